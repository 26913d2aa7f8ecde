"""What came out, as data, as text and as a page."""
