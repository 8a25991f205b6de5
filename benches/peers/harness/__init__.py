"""What the comparison is made of: cases, their data, the workers that run them, and tables of results."""
