"""Tables, figures, pages and terminal output of records. Nothing here knows where a record comes from."""
