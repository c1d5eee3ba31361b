"""A store in a bucket of S3. boto3, which is slow to import, comes with ``store``."""
