"""Functions over numpy arrays that numba compiles. They share a folder, as one may be part of another."""
