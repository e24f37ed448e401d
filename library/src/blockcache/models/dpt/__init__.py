"""DP-T, the transformer of Diffusion Policy: denoiser, blocks, program, policy and the public checkpoints."""
