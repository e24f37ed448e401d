"""What a policy is to us, and one folder for each model family. Knows nothing of schedules in use."""
