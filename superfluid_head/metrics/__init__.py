"""What the head measures, for Prometheus: `HeadMetrics`, and the parts that others name.

Floors, lowest first: `labels` (bounded label values), `rows` (a tenant's view), `nodes` (a row per node), `head` (all of it). Names begin with `superfluid_head_`; docs/metrics.md is made from them.
"""

from superfluid_head.metrics.head import HeadMetrics, Meter
from superfluid_head.metrics.labels import LABEL_VALUES_MAX, OTHERS, TENANTS_MAX

__all__ = ["LABEL_VALUES_MAX", "OTHERS", "TENANTS_MAX", "HeadMetrics", "Meter"]
