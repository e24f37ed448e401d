"""adaLN DiT, the transformer of LeRobot's `multi_task_dit`: how it is found, its blocks, its program, our own policy and its
files; by DDPM and DDIM, or by flow matching with Euler steps."""
