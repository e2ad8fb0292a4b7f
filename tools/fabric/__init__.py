"""What tools/check_fabric.py measures between two hosts."""
