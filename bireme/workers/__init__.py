"""How pipelines reach the models: one interface, inside Triton by BLS and outside by gRPC."""
