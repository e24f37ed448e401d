"""RDT, the Robotics Diffusion Transformer: denoiser, blocks, program, policy and the public weights."""
