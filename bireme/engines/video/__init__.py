"""Engines that make videos and pictures, the process in which one runs, and the stub's side of it."""
