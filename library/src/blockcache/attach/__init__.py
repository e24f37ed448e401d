"""Being inside a running policy: patches, the scope of one generation, the recorder. Knows nothing of tasks."""
