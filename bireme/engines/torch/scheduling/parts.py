"""What the engine's thread works with; made by loading.py."""

from __future__ import annotations

from dataclasses import dataclass, field

from bireme.engines.base import RequestKey
from bireme.engines.torch.forward.forward import Forward
from bireme.engines.torch.geometry import EngineLimits
from bireme.engines.torch.images.picture_store import PictureStore
from bireme.engines.torch.pools.block_mover import BlockMover
from bireme.engines.torch.scheduling.admission import Admission
from bireme.engines.torch.scheduling.disaggregation import TorchExporter, TorchImporter
from bireme.engines.torch.scheduling.guides import TorchGuides
from bireme.engines.torch.scheduling.metrics import TorchMetrics
from bireme.engines.torch.scheduling.speculation.speculation import Speculation
from bireme.engines.torch.scheduling.step_costs import StepCosts
from bireme.engines.torch.step import Post
from bireme.kv.blocks.block_manager import BlockManager
from bireme.kv.wire.step_records import StepRing
from bireme.logits.sampler import Sampler
from bireme.request_trace import PromptWork


@dataclass(slots=True)
class Parts:
    worker: str
    life: int
    post: Post
    limits: EngineLimits
    forward: Forward
    manager: BlockManager
    sampler: Sampler[RequestKey]
    admission: Admission
    accounts: TorchMetrics
    guides: TorchGuides
    costs: StepCosts
    exporter: TorchExporter | None = None
    importer: TorchImporter | None = None
    mover: BlockMover | None = None  # where blocks have tiers below the device
    pictures: PictureStore | None = None  # of a model that takes pictures
    speculation: Speculation | None = None  # where the settings ask for drafts
    steps: StepRing | None = None  # where step records are asked for
    prompt_work: PromptWork = field(default_factory=PromptWork)
