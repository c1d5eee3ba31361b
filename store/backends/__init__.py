"""Where objects lie: memory, a folder, S3, HTTP."""
