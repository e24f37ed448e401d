"""Small camera policies: ours, and one with the public code's classes and tensor names that shares nothing with ours."""

import torch
from conftest import randomise, tiny_config
from diffusers import DDPMScheduler
from torch import nn
from torch.nn import functional as F

import foreign_policy
from blockcache.models.dpt.encoder import EncoderConfig, Input
from blockcache.models.dpt.policy import DiffusionTransformerPolicy
from blockcache.schedule import Schedule

SEEN = 2
WRIST = Input("wrist", (3, 44, 76))
IMAGE = Input("image", (3, 44, 76))
ARM, HAND = Input("arm", (3,)), Input("hand", (2,))
CROP = (37, 70)  # neither square nor even: 2 x 3 places behind the trunk
ENCODERS = {
    "one camera": EncoderConfig((IMAGE, HAND), CROP, width=16, keypoints=5, features=7),
    "two cameras apart": EncoderConfig((ARM, IMAGE, HAND, WRIST), CROP, width=16, keypoints=3, features=4),
    "two cameras shared": EncoderConfig((IMAGE, WRIST, HAND), CROP, shared=True, width=16, keypoints=3, features=4),
    "no crop, no numbers": EncoderConfig((Input("image", (3, 34, 40)),), width=16, keypoints=4, features=6),
}
BLOCKS = [f"layers.{index}.{kind}" for index in range(2) for kind in ("SA", "CA", "FFN")]
REDUCED = Schedule(6, dict.fromkeys(BLOCKS, (0, 2, 4)))


def image_policy(encoder="one camera", seed=0, **changes):
    """Ours, with weights large enough for the frames to matter."""
    config = ENCODERS[encoder]
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        policy = DiffusionTransformerPolicy(tiny_config(obs_dim=config.size, encoder=config, **changes))
        randomise(policy.model, seed)
        for parameter in policy.obs_encoder.parameters():
            if parameter.ndim == 1:
                parameter.data.add_(0.3 * torch.randn_like(parameter))
            else:
                parameter.data.mul_(1.5)
        for net in policy.obs_encoder.obs_nets.values():
            net.pool.nets.weight.data.mul_(4)
            net.pool.temperature.fill_(0.8)
        for name, shape in policy.config.inputs.items():
            if name not in policy.config.cameras:
                policy.normalizer.field(name).scale.copy_(0.5 + torch.rand(shape[-1]))
                policy.normalizer.field(name).offset.copy_(torch.randn(shape[-1]))
        policy.normalizer.action.scale.copy_(0.5 + torch.rand(3))
        policy.normalizer.action.offset.copy_(torch.randn(3))
    return policy.eval()


def observed(encoder="one camera", batch=2, seed=0, steps=SEEN, dtype=torch.uint8):
    """Frames as a camera gives them, and numbers."""
    generator, found = torch.Generator().manual_seed(seed), {}
    for item in ENCODERS[encoder].inputs:
        shape = (batch, steps, *item.shape)
        if not item.is_camera:
            found[item.name] = torch.randn(shape, generator=generator)
            continue
        coarse = torch.rand(batch * steps, 3, 5, 7, generator=generator)  # blobs, so that places differ
        frames = F.interpolate(coarse, item.shape[1:], mode="bilinear").reshape(shape)
        found[item.name] = (frames * 255).round().to(torch.uint8) if dtype == torch.uint8 else frames.to(dtype)
    return found


# -- what follows is written from the public code's behaviour alone; names are those of its tensors


class Shortcut(nn.Module):
    def __init__(self, before, after, stride):
        super().__init__()
        self.conv1 = nn.Conv2d(before, after, 3, stride, 1, bias=False)
        self.bn1 = nn.GroupNorm(after // 16, after)
        self.relu = nn.ReLU(inplace=True)
        self.conv2 = nn.Conv2d(after, after, 3, 1, 1, bias=False)
        self.bn2 = nn.GroupNorm(after // 16, after)
        self.downsample = None
        if stride != 1:
            self.downsample = nn.Sequential(
                nn.Conv2d(before, after, 1, stride, bias=False), nn.GroupNorm(after // 16, after)
            )

    def forward(self, x):
        identity = x
        out = self.relu(self.bn1(self.conv1(x)))
        out = self.bn2(self.conv2(out))
        if self.downsample is not None:
            identity = self.downsample(x)
        out += identity
        return self.relu(out)


class ResNetConv(nn.Module):
    def __init__(self, width):
        super().__init__()
        layers = [nn.Sequential(Shortcut(width, width, 1), Shortcut(width, width, 1))]
        for index in range(3):
            wide = width * 2**index
            layers.append(nn.Sequential(Shortcut(wide, 2 * wide, 2), Shortcut(2 * wide, 2 * wide, 1)))
        stem = nn.Conv2d(3, width, kernel_size=(7, 7), stride=(2, 2), padding=(3, 3), bias=False)
        norm = nn.GroupNorm(width // 16, width)
        self.nets = nn.Sequential(stem, norm, nn.ReLU(inplace=True), nn.MaxPool2d(3, 2, 1), *layers)

    def forward(self, x):
        return self.nets(x)


class Keypoints(nn.Module):
    def __init__(self, channels, height, width, count):
        super().__init__()
        self._in_h, self._in_w, self._num_kp = height, width, count
        self.nets = nn.Conv2d(channels, count, kernel_size=1)
        self.register_buffer("temperature", nn.Parameter(torch.ones(1), requires_grad=False))
        xs, ys = [], []
        for row in range(height):
            for column in range(width):
                ys.append(-1 + 2 * row / (height - 1))
                xs.append(-1 + 2 * column / (width - 1))
        self.register_buffer("pos_x", torch.tensor([xs]))
        self.register_buffer("pos_y", torch.tensor([ys]))
        self.output_variance, self.noise_std, self.learnable_temperature = False, 0.0, False
        self.kps = None

    def forward(self, feature):
        feature = self.nets(feature).reshape(-1, self._in_h * self._in_w)
        attention = F.softmax(feature / self.temperature, dim=-1)
        x = torch.sum(self.pos_x * attention, dim=1, keepdim=True)
        y = torch.sum(self.pos_y * attention, dim=1, keepdim=True)
        self.kps = torch.cat([x, y], 1).view(-1, self._num_kp, 2).detach()
        return self.kps


class Core(nn.Module):
    def __init__(self, encoder, seen):
        super().__init__()
        self.backbone = ResNetConv(encoder.width)
        self.pool = Keypoints(8 * encoder.width, -(-seen[0] // 32), -(-seen[1] // 32), encoder.keypoints)
        last = nn.Linear(2 * encoder.keypoints, encoder.features)
        self.nets = nn.Sequential(self.backbone, self.pool, nn.Flatten(1, -1), last)

    def forward(self, inputs):
        return self.nets(inputs)


class CentreCrop(nn.Module):
    """Crops at random while it trains, else in the middle."""

    def __init__(self, frame, crop):
        super().__init__()
        self.input_shape, (self.crop_height, self.crop_width) = frame, crop
        self.num_crops, self.pos_enc = 1, False

    def forward_in(self, x):
        assert not self.training
        top = round((x.shape[-2] - self.crop_height) / 2.0)
        left = round((x.shape[-1] - self.crop_width) / 2.0)
        return x[..., top : top + self.crop_height, left : left + self.crop_width]

    def forward_out(self, x):
        return x


class PublicEncoder(nn.Module):
    """Nets and randomizers by key, None for numbers, in the order of `obs_shapes`; a ReLU behind each net."""

    def __init__(self, encoder):
        super().__init__()
        self.obs_shapes = {item.name: list(item.shape) for item in encoder.inputs}
        self.obs_nets, self.obs_randomizers = nn.ModuleDict(), nn.ModuleDict()
        first = None
        for item in encoder.inputs:
            net = crop = None
            if item.is_camera:
                seen = encoder.crop or item.shape[1:]
                net = first if encoder.shared and first is not None else Core(encoder, seen)
                first = first or net
                crop = None if encoder.crop is None else CentreCrop(list(item.shape), encoder.crop)
            self.obs_nets[item.name], self.obs_randomizers[item.name] = net, crop
        self.activation = nn.ReLU()

    def forward(self, obs_dict):
        feats = []
        for key in self.obs_shapes:
            x = obs_dict[key]
            if self.obs_randomizers[key] is not None:
                x = self.obs_randomizers[key].forward_in(x)
            if self.obs_nets[key] is not None:
                x = self.activation(self.obs_nets[key](x))
            if self.obs_randomizers[key] is not None:
                x = self.obs_randomizers[key].forward_out(x)
            feats.append(torch.flatten(x, start_dim=1))
        return torch.cat(feats, dim=-1)


class PublicImagePolicy(nn.Module):
    """The interface of the public hybrid image policy; global noise, one scheduler for all calls."""

    def __init__(self, own, steps=6):
        super().__init__()
        config = own.config
        self.obs_encoder = PublicEncoder(config.encoder)
        self.model = _denoiser(config)
        self.normalizer = nn.Module()
        self.normalizer.params_dict = nn.ParameterDict()
        for name, field in own.normalizer.params_dict.items():
            stats = nn.ParameterDict({key: value.clone() for key, value in field.input_stats.named_buffers()})
            parts = {"scale": field.scale.clone(), "offset": field.offset.clone(), "input_stats": stats}
            self.normalizer.params_dict[name] = nn.ParameterDict(parts)
        self.normalizer.requires_grad_(False)
        self.noise_scheduler = DDPMScheduler(100, beta_schedule="squaredcos_cap_v2", clip_sample=True)
        self.num_inference_steps, self.kwargs = steps, {}
        self.horizon, self.n_obs_steps, self.n_action_steps = config.horizon, config.n_obs_steps, config.n_action_steps
        self.obs_feature_dim, self.action_dim = config.obs_dim, config.action_dim
        self.obs_as_cond, self.pred_action_steps_only = True, False
        self.load_state_dict(own.state_dict())
        self.eval()

    def scaled(self, name, value, back=False):
        field = self.normalizer.params_dict[name]
        rows = value.to(field["scale"].dtype).reshape(-1, len(field["scale"]))
        rows = (rows - field["offset"]) / field["scale"] if back else rows * field["scale"] + field["offset"]
        return rows.reshape(value.shape)

    @torch.no_grad()
    def predict_action(self, obs_dict):
        assert "past_action" not in obs_dict
        nobs = {name: self.scaled(name, value) for name, value in obs_dict.items()}
        batch = next(iter(nobs.values())).shape[0]
        this = {name: x[:, : self.n_obs_steps].reshape(-1, *x.shape[2:]) for name, x in nobs.items()}
        cond = self.obs_encoder(this).reshape(batch, self.n_obs_steps, -1)
        x = torch.randn(size=(batch, self.horizon, self.action_dim))
        self.noise_scheduler.set_timesteps(self.num_inference_steps)
        for t in self.noise_scheduler.timesteps:
            x = self.noise_scheduler.step(self.model(x, t, cond), t, x, **self.kwargs).prev_sample
        chunk = self.scaled("action", x, back=True)
        start = self.n_obs_steps - 1
        return {"action": chunk[:, start : start + self.n_action_steps], "action_pred": chunk}


def _denoiser(config):
    """foreign_policy's, which has its sizes in its module."""
    sizes = {"WIDTH": config.n_emb, "HEADS": config.n_head, "DEPTH": config.n_layer, "TOKENS": config.horizon}
    sizes |= {"SEEN": config.n_obs_steps, "OBS": config.obs_dim, "ACTION": config.action_dim}
    before = {name: getattr(foreign_policy, name) for name in sizes}
    try:
        vars(foreign_policy).update(sizes)
        denoiser = foreign_policy.Denoiser()
        denoiser.time_emb = SizedClock(config.n_emb)
    finally:
        vars(foreign_policy).update(before)
    del denoiser._dummy_variable
    return denoiser


class SizedClock(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.width = width

    def forward(self, t):
        half = self.width // 2
        steps = torch.exp(torch.arange(half) * -(torch.log(torch.tensor(10000.0)) / (half - 1)))
        angle = t[:, None].float() * steps[None]
        return torch.cat([angle.sin(), angle.cos()], dim=1)


class Strange(nn.Module):
    """An encoder like no other: a pixel here and there, and where it looked last."""

    def __init__(self, own):
        super().__init__()
        self.own, self.last = own, None

    def forward(self, obs):
        self.last = obs["image"][:, :, 20, 30]
        return self.own(obs) + self.last.sum(dim=1, keepdim=True)


def strange():
    policy = PublicImagePolicy(image_policy())
    policy.obs_encoder = Strange(policy.obs_encoder).eval()
    return policy
