"""What tools/advise.py reads beside traces."""
