"""adaLN DiT, the transformer of LeRobot's `multi_task_dit`: denoiser, blocks, program, policy and LeRobot's files."""
