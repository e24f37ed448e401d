"""One page about one policy, from whatever files of it there are. Knows nothing of torch or of how a page is drawn."""
