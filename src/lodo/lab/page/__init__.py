"""The HTML page: what a folder of results holds, as sections with tables and interactive plots."""
