"""Which blob belongs to which document, and how often documents are used."""
