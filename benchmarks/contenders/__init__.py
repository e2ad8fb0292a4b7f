"""Servers that benchmarks compare: each is started with the same model, pace and place, and ends with its block.

endpoint.py   what a benchmark is told of one
ours.py       bireme's frontend before a tritonserver with the mocker
dynamo.py     ai-dynamo's frontend and mocker, from PyPI into an environment of their own
"""
