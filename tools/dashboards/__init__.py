"""The four Grafana dashboards as typed objects, a module each; tools/make_dashboards.py writes them as JSON."""
