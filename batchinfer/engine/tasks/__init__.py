"""Rows that are read and not answered: scored, embedded, classified, ranked."""
