"""A run as one page of HTML: charts and tables, with nothing to fetch and no script."""
