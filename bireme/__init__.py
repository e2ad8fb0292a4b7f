"""bireme: disaggregated LLM serving on a stock Triton Inference Server."""

__version__ = "0.1.0"
