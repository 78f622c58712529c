"""The HTML page: a folder of results as sections with tables and interactive plots."""
