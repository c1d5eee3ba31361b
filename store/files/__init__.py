"""Files on a local disk: reading, durable writing, SQLite, and errors of the operating system."""
