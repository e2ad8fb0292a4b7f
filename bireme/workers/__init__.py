"""How pipelines reach the models: by BLS inside Triton, by gRPC outside."""
