"""Finished runs compared: run folders become records, records a page. `fullrank.comparison.page` has the way in."""
