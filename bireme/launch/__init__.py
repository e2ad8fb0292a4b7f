"""Starts and watches a tritonserver from outside; never imported by a stub."""

from bireme.launch.ports import Ports, free_port, free_ports
from bireme.launch.tritonserver import Server, ServerOptions, ServerStartError, start_server

__all__ = ["Ports", "Server", "ServerOptions", "ServerStartError", "free_port", "free_ports", "start_server"]
