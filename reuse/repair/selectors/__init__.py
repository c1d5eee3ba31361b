"""Ways of choosing rows, one per file; see ``Selector`` in ``base.py``."""

from kvwire.reuse.repair.selectors.attention import Attention
from kvwire.reuse.repair.selectors.base import Selector
from kvwire.reuse.repair.selectors.blend import Blend
from kvwire.reuse.repair.selectors.cacheblend import CacheBlend
from kvwire.reuse.repair.selectors.deviation import Deviation, Product
from kvwire.reuse.repair.selectors.fixed import Everything, First, Nothing, Random

SELECTORS: dict[str, Selector] = {
    selector.name: selector
    for selector in (
        Nothing(),
        Everything(),
        Random(),
        First(),
        CacheBlend(),
        CacheBlend(sides="keys", writes_all=False, name="lmcache"),
        Attention(),
        Blend(),
        Deviation(),
        Product(),
    )
}
"""By the name that ``--selector`` and ``selector_of`` take."""
