"""Looking after a store: collect garbage, verify everything, copy to another store."""
