"""What the book needs and the cache does not: building the site, drawing, teaching."""
