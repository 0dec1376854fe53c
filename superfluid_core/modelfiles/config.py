"""The shape of a model, as one value, whichever file it was written in.

Owns nothing: `config_from_hf` reads config.json (config_hf.py), `config_from_gguf` GGUF metadata (config_gguf.py), `config_to_hf`
writes the former. All of them refuse what this product would compute wrongly, so that the engine may trust a `ModelConfig` blindly.
"""

from superfluid_core.modelfiles.config_gguf import config_from_gguf
from superfluid_core.modelfiles.config_hf import config_from_hf
from superfluid_core.modelfiles.config_written import config_to_hf
from superfluid_core.modelfiles.shape import Mixture, ModelConfig, RopeScaling

__all__ = [
    "Mixture",
    "ModelConfig",
    "RopeScaling",
    "config_from_gguf",
    "config_from_hf",
    "config_to_hf",
]
