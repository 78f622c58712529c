"""From curves to tables and figures."""
