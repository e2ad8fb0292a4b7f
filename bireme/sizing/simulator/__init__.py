"""Requests through the real router and index to workers in virtual time. The same seed gives the same figures."""
