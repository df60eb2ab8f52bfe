"""Image models of timm, one or more of each family, made small, trained for two steps."""

from __future__ import annotations

import importlib
import sys
import types
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from .program import Program, Run, add

CLASSES, STEPS = 5, 2
VIT = {"img_size": 32, "patch_size": 8, "embed_dim": 32, "depth": 2, "num_heads": 2}
#: stages of hierarchical models, one block in each
ONES = (1, 1, 1, 1)
THIN = (16, 24, 32, 48)
EVEN = (16, 32, 64, 128)


@dataclass(frozen=True)
class Model:
    name: str
    settings: dict[str, Any] = field(default_factory=dict)
    side: int = 32
    rows: int = 2

    def __call__(self, run: Run) -> None:
        timm = import_timm()
        model = timm.create_model(self.name, num_classes=CLASSES, **self.settings).train()
        forward = run.compile(model)

        def step(n: int) -> Tensor:
            drawn = torch.Generator().manual_seed(n)
            x = torch.randn(self.rows, 3, self.side, self.side, generator=drawn)
            found = forward(x)
            scores = found if isinstance(found, Tensor) else sum(found)
            return F.cross_entropy(scores, torch.arange(self.rows))

        run.train(model, step, optimizer=torch.optim.SGD(model.parameters(), 0.1), steps=STEPS)


def import_timm() -> Any:
    """timm asks for torchvision at import, of which its models use names only.

    Without torchvision, those names stand in for it while timm is imported, and no longer.
    """
    if "timm" in sys.modules:
        return sys.modules["timm"]
    importlib.import_module("torch._dynamo")  # asks for torchvision itself, in its own way
    try:
        importlib.import_module("torchvision")
    except (ImportError, RuntimeError):
        for name in [n for n in sys.modules if n.partition(".")[0] == "torchvision"]:
            del sys.modules[name]
        with _stand_in():
            return importlib.import_module("timm")
    return importlib.import_module("timm")


class _Mode(Enum):
    NEAREST = "nearest"
    BILINEAR = "bilinear"
    BICUBIC = "bicubic"
    BOX = "box"
    HAMMING = "hamming"
    LANCZOS = "lanczos"


@contextmanager
def _stand_in() -> Iterator[None]:
    anything = {"__getattr__": lambda name: type(name, (), {})}
    layer = {"FrozenBatchNorm2d": type("FrozenBatchNorm2d", (nn.Module,), {})}
    modes = {"InterpolationMode": _Mode}
    held: dict[str, dict[str, Any]] = {
        "torchvision": {},
        "torchvision.transforms": modes | anything,
        "torchvision.transforms.functional": modes,
        "torchvision.ops": {},
        "torchvision.ops.misc": layer,
        "torchvision.datasets": anything,
    }
    for name, given in held.items():
        module = types.ModuleType(name)
        module.__dict__.update(given, __path__=[])
        sys.modules[name] = module
        parent, _, last = name.rpartition(".")
        if parent:
            setattr(sys.modules[parent], last, module)
    try:
        yield
    finally:
        for name in held:
            del sys.modules[name]


MODELS = (
    Model("test_vit", VIT),
    Model("test_vit2", VIT),
    Model("test_vit3", VIT),
    Model("test_vit4", VIT),
    Model("test_byobnet"),
    Model("test_convnext"),
    Model("test_convnext2"),
    Model("test_convnext3"),
    Model("test_efficientnet"),
    Model("test_efficientnet_gn"),
    Model("test_efficientnet_ln"),
    Model("test_efficientnet_evos"),
    Model("test_mambaout"),
    Model("test_nfnet"),
    Model("test_resnet"),
    Model("test_coatnet", {"img_size": 64}, 64),
    Model("beit_base_patch16_224", VIT),
    Model("beitv2_base_patch16_224", VIT),
    Model("botnet26t_256", {"img_size": 64}, 64),
    Model("cait_xxs24_224", VIT | {"depth_token_only": 1}),
    Model("convit_tiny", VIT | {"local_up_to_layer": 1}),
    Model("convnext_atto", {"depths": ONES, "dims": THIN}),
    Model("convnextv2_atto", {"depths": ONES, "dims": THIN}),
    Model("darknet17", {}, 64),
    Model("cspresnet50", {}, 64),
    Model("davit_tiny", {"depths": ONES, "embed_dims": EVEN, "num_heads": (1, 2, 2, 4)}, 64),
    Model("deit_tiny_distilled_patch16_224", VIT),
    Model("deit3_small_patch16_224", VIT),
    Model("densenet121", {"block_config": (2, 2, 1, 1), "growth_rate": 8}),
    Model("dla34", {}, 64),
    Model("dpn48b", {"k_sec": (1, 1, 1, 1)}, 64),
    Model("edgenext_xx_small", {"depths": ONES}, 64),
    Model("efficientvit_b0", {"depths": ONES}, 64),
    # two rows make batch norms of two values each, whose gradients are rounding errors
    Model("efficientvit_m0", {"img_size": 64}, 64, rows=4),
    Model("eva02_tiny_patch14_224", {"img_size": 28, "depth": 2}, 28),
    Model("fasternet_t0", {"depths": ONES}, 64),
    Model("fastvit_t8", {"layers": ONES}, 64),
    Model("focalnet_tiny_srf", {}, 64),
    Model("ghostnet_050", {}, 32),
    Model("hgnet_tiny", {}, 64),
    Model("hiera_tiny_224", {"img_size": (64, 64), "embed_dim": 16, "stages": ONES}, 64),
    Model("hrnet_w18_small", {}, 64),
    Model("inception_next_atto", {"depths": ONES}, 64),
    Model("inception_v3", {}, 96),
    Model("levit_128s", {"img_size": 64, "depth": (1, 1, 1)}, 64),
    Model("resmlp_12_224", {"img_size": 32}),
    Model("gmlp_s16_224", {"img_size": 32}),
    Model("mobilenetv3_small_050", {}, 32),
    Model("lcnet_035", {}, 32),
    Model("mobilevit_xxs", {}, 64),
    Model("mobilevitv2_050", {}, 64),
    Model("mvitv2_tiny", {"img_size": 64}, 64),
    Model("nest_tiny", {"img_size": 64}, 64),
    Model("nf_resnet26", {}, 32),
    Model("pit_ti_224", {"img_size": 64}, 64),
    Model("poolformer_s12", {}, 64),
    Model("caformer_s18", {}, 64),
    Model("pvt_v2_b0", {"depths": ONES}, 64),
    Model("regnetx_002", {}, 32),
    Model("regnety_002", {}, 32),
    Model("repghostnet_050", {}, 32),
    Model("repvit_m0_9", {"depth": ONES}, 64),
    Model("res2net50_48w_2s", {"layers": ONES}, 64),
    Model("resnest14d", {}, 64),
    Model("resnet10t", {}, 64),
    Model("resnetblur50", {"layers": ONES}, 64),
    Model("seresnext26d_32x4d", {"layers": ONES}, 64),
    Model("resnetv2_18", {}, 64),
    Model("resnetv2_50x1_bit", {}, 64),
    Model("rexnet_100", {}, 32),
    Model("selecsls42", {}, 64),
    Model("legacy_seresnet18", {}, 64),
    Model("sequencer2d_s", {"layers": ONES, "img_size": 56}, 56),
    Model("skresnet18", {}, 64),
    Model("starnet_s050", {}, 64),
    Model("swiftformer_xs", {"layers": ONES}, 64),
    Model(
        "swin_tiny_patch4_window7_224",
        {"img_size": 56, "depths": (2, 1), "num_heads": (2, 2), "embed_dim": 16},
        56,
    ),
    Model(
        "swin_s3_tiny_224",
        {
            "img_size": 56,
            "window_size": (7, 7),
            "depths": (2, 1),
            "num_heads": (2, 2),
            "embed_dim": 16,
        },
        56,
    ),
    Model(
        "swinv2_tiny_window8_256",
        {"img_size": 64, "depths": (2, 1), "num_heads": (2, 2), "embed_dim": 16},
        64,
    ),
    Model(
        "swinv2_cr_tiny_224",
        {"img_size": 56, "depths": (2, 1), "num_heads": (2, 2), "embed_dim": 16},
        56,
    ),
    Model("tiny_vit_5m_224", {"depths": ONES}, 64),
    Model(
        "tnt_s_patch16_224",
        {"img_size": 32, "embed_dim": 48, "depth": 2, "inner_dim": 24, "num_heads_outer": 2},
        32,
    ),
    Model("twins_svt_small", {"img_size": 64, "depths": ONES, "wss": (2, 2, 2, 2)}, 64),
    Model("visformer_tiny", {"img_size": 64, "depth": (1, 1, 1)}, 64),
    Model("vit_relpos_small_patch16_224", VIT),
    Model("vit_srelpos_small_patch16_224", VIT),
    Model("samvit_base_patch16_224", VIT | {"window_size": 2, "global_attn_indexes": (1,)}),
    Model(
        "vit_tiny_r_s16_p8_224", {"img_size": 64, "depth": 2, "embed_dim": 32, "num_heads": 2}, 64
    ),
    Model("ese_vovnet19b_slim", {}, 64),
    Model("xcit_nano_12_p16_224", {"img_size": 64, "depth": 2}, 64),
)

for model in MODELS:
    add(Program("timm", model.name, model, ("timm",)))
