"""What is known of a document's cache before anything is decoded."""
