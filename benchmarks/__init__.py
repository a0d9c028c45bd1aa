"""How fast samkit is, measured beside its peers: ``make bench``. Never part of a test."""
