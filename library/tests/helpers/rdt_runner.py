"""A stand-in for the public RDT runner: the same parts by name, code of its own, six arguments."""

from conftest import randomise
from diffusers import DPMSolverMultistepScheduler
from torch import nn

from blockcache.models.rdt.denoiser import Block as Ours
from blockcache.models.rdt.denoiser import RDTDenoiser


class Foreign(nn.Module):
    """The parts of one of our blocks in code of another project; subclasses put them together in other ways."""

    def __init__(self, ours):
        super().__init__()
        for name, part in ours.named_children():
            self.add_module(name, part)

    def forward(self, x, c, mask=None):
        x = self.attn(self.norm1(x)) + x
        x = self.cross_attn(self.norm2(x), c, mask) + x
        return self.ffn(self.norm3(x)) + x


class PostNorm(Foreign):
    def forward(self, x, c, mask=None):
        x = self.norm1(x + self.attn(x))
        x = self.norm2(x + self.cross_attn(x, c, mask))
        return self.norm3(x + self.ffn(x))


class OtherOrder(Foreign):
    def forward(self, x, c, mask=None):
        x = self.cross_attn(self.norm2(x), c, mask) + x
        x = self.attn(self.norm1(x)) + x
        return self.ffn(self.norm3(x)) + x


class Parallel(Foreign):
    def forward(self, x, c, mask=None):
        return x + self.attn(self.norm1(x)) + self.cross_attn(self.norm2(x), c, mask) + self.ffn(self.norm3(x))


class Runner(nn.Module):
    def __init__(self, config, block):
        super().__init__()
        parts = RDTDenoiser.of(config)
        self.model = parts.model
        self.lang_adaptor, self.img_adaptor = parts.lang_adaptor, parts.img_adaptor
        self.state_adaptor = parts.state_adaptor
        self.model.blocks = nn.ModuleList(block(item) for item in self.model.blocks if isinstance(item, Ours))
        self.noise_scheduler_sample = DPMSolverMultistepScheduler(
            num_train_timesteps=1000, beta_schedule="squaredcos_cap_v2", prediction_type="sample"
        )
        self.num_inference_timesteps = config.sampler.num_inference_steps

    def predict_action(self, lang_tokens, lang_attn_mask, img_tokens, state_tokens, action_mask, ctrl_freqs):
        raise NotImplementedError("six arguments")


def runner(config, block=Foreign):
    return randomise(Runner(config, block)).eval()
