"""The reduction as an Optax transformation: its state, its memories, and its helpers."""

from cgx_jax.transforms.diloco import diloco as diloco
from cgx_jax.transforms.diloco import local_params as local_params
from cgx_jax.transforms.diloco import local_steps as local_steps
from cgx_jax.transforms.memory import ErrorFeedback as ErrorFeedback
from cgx_jax.transforms.memory import Memory as Memory
from cgx_jax.transforms.memory import MomentumCorrection as MomentumCorrection
from cgx_jax.transforms.metrics import metrics as metrics
from cgx_jax.transforms.precondition import SecondMoment as SecondMoment
from cgx_jax.transforms.resize import resize_state as resize_state
from cgx_jax.transforms.state import SyncState as SyncState
from cgx_jax.transforms.state import state_shardings as state_shardings
from cgx_jax.transforms.state import state_specs as state_specs
from cgx_jax.transforms.sync_gradients import scatter_gradients as scatter_gradients
from cgx_jax.transforms.sync_gradients import sync_gradients as sync_gradients
