"""Parts of tools/sweep.py: the matrix, its launches, the loads, the folder of results."""
