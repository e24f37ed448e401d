"""The pages and sections that the laboratory writes from files of results."""
