"""The comparison that ``kvwire demo`` runs."""
