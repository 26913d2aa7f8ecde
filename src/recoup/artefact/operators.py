"""Which operators a saved graph may call: those that compute on tensors in memory, and nothing else.

The list is closed, because a graph may come from a stranger and torch registers thousands of operators. Among them are
`from_file`, which maps any file for writing, and some that believe what they are told about sizes. A name that is not
here cannot be saved either, so capture and this table meet when a result is saved and not when it is loaded.

In place is possible, as `relu_` and `add_` on activations are what networks do: with nothing here that maps a file,
such an operator writes into the memory of the loaded model. One with `out=` writes where it likes and is left out.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Collection
from typing import Any

import torch
from torch._ops import OpOverload

from recoup.errors import ArtefactError
from recoup.operators.record import known_operators

# Python's functions of a graph, by the name they are saved under: arithmetic on sizes, and parts of a list.
_INTEGERS = "getitem add sub mul floordiv mod truediv neg pow eq ne lt le gt ge and_ or_"
_SYMBOLIC = "sym_max sym_min sym_float sym_int sym_not sym_ite"
FUNCTIONS: dict[str, Callable[..., Any]] = {
    **{f"operator.{name}": getattr(operator, name) for name in _INTEGERS.split()},
    **{f"math.{name}": getattr(math, name) for name in ("floor", "ceil", "trunc")},
    **{f"torch.{name}": getattr(torch, name) for name in _SYMBOLIC.split() if hasattr(torch, name)},
}

# Besides those with a record in `recoup.operators` and those that torch tags as pointwise; in-place twins come along.
# Left out though networks have them: what draws random numbers, what has results whose size depends on values
# (`nonzero`, `unique`, `masked_select`), and what trusts its operands too much (`embedding_bag`, `segment_reduce`).
_NAMES = """
    sym_stride sym_storage_offset

    addbmm addmv addr baddbmm chain_matmul dot inner kron linalg_matmul linalg_multi_dot linalg_vecdot mv outer ger
    tensordot vdot cross linalg_cross trace
    cholesky det inverse logdet matrix_exp matrix_power pinverse linalg_cholesky linalg_det linalg_eigh linalg_inv
    linalg_matrix_exp linalg_matrix_norm linalg_norm linalg_pinv linalg_qr linalg_slogdet linalg_solve
    linalg_solve_triangular linalg_svd linalg_svdvals

    native_group_norm frobenius_norm norm_except_dim _weight_norm renorm cosine_similarity pairwise_distance cdist
    _euclidean_dist dist pdist sum_to_size nanmean count_nonzero trapezoid cumulative_trapezoid diff aminmax
    cummax cummin special_logsumexp special_softmax special_log_softmax
    sort argsort topk kthvalue median nanmedian mode quantile nanquantile msort searchsorted bucketize isin

    gather scatter scatter_add scatter_reduce index_add index_copy index_fill index_put index_reduce masked_scatter
    take take_along_dim put select_scatter slice_scatter diagonal_scatter as_strided diag diag_embed tril triu one_hot
    hstack vstack dstack column_stack row_stack concatenate block_diag cartesian_prod meshgrid hsplit vsplit dsplit
    moveaxis ravel fliplr flipud atleast_1d adjoint mH matrix_H unsafe_split_with_sizes masked_fill
    alias_copy detach_copy expand_copy narrow_copy permute_copy select_copy slice_copy split_copy
    split_with_sizes_copy squeeze_copy t_copy transpose_copy unbind_copy unsqueeze_copy view_copy
    view_as_real view_as_complex real imag conj _conj resolve_conj resolve_neg complex polar

    arange range linspace logspace eye scalar_tensor empty_like empty_strided new_empty_strided empty_permuted
    tril_indices triu_indices hann_window hamming_window blackman_window bartlett_window kaiser_window

    reflection_pad1d reflection_pad2d reflection_pad3d replication_pad1d replication_pad2d replication_pad3d
    _pad_circular _pad_enum conv_tbc conv_depthwise3d _convolution _convolution_mode max_unpool2d max_unpool3d
    _upsample_nearest_exact1d _upsample_nearest_exact3d _upsample_bicubic2d_aa affine_grid_generator

    lstm gru rnn_tanh rnn_relu lstm_cell gru_cell rnn_tanh_cell rnn_relu_cell
    _scaled_dot_product_attention_math _scaled_dot_product_flash_attention_for_cpu

    fft_fft fft_ifft fft_rfft fft_irfft fft_hfft fft_ihfft fft_fft2 fft_ifft2 fft_rfft2 fft_irfft2 fft_fftn fft_ifftn
    fft_rfftn fft_irfftn fft_fftfreq fft_rfftfreq fft_fftshift fft_ifftshift stft istft _fft_r2c _fft_c2r _fft_c2c

    absolute arccos arccosh arcsin arcsinh arctan arctan2 arctanh negative subtract multiply divide floor_divide
    greater greater_equal less less_equal not_equal fix isclose isreal softmin log_sigmoid_forward _prelu_kernel
    __and__ __or__ __iand__ __ior__ rrelu_with_noise
    special_expit special_erf special_erfc special_exp2 special_expm1 special_log1p special_logit special_round
    special_sinc special_xlogy special_digamma special_gammaln special_psi special_ndtr special_i0

    mse_loss l1_loss smooth_l1_loss huber_loss soft_margin_loss nll_loss nll_loss_nd nll_loss2d cross_entropy_loss
    binary_cross_entropy binary_cross_entropy_with_logits kl_div
"""
_PURE = frozenset(_NAMES.split())


def name_of(target: Any) -> str:
    """The name an operation is saved under.

    Raises:
        ArtefactError: it has none, or a saved graph may not hold it.
    """
    if isinstance(target, OpOverload):
        name = str(target)
        if target.namespace == "aten" and not _is_allowed(target):
            raise _unsaved(name)
        return name
    found = next((name for name, function in FUNCTIONS.items() if function is target), None)
    if found is None:
        raise _unsaved(str(target))
    return found


def operation(name: str, libraries: Collection[str] = ()) -> Callable[..., Any]:
    """The operation of that name; those of other libraries than torch's only if the caller allows the library.

    Raises:
        ArtefactError: it is none that a saved graph may hold.
    """
    if name in FUNCTIONS:
        return FUNCTIONS[name]
    library, _, rest = name.partition(".")
    if library != "aten" and library not in libraries:
        raise ArtefactError(
            f"the graph calls {name}, an operator of the library {library!r}. If you trust the folder, import that "
            f"library and pass operators=({library!r},) to `load`."
            if library.isidentifier()
            else f"the graph calls {name!r}, which is no operator."
        )
    found = _find(library, *rest.split("."))
    if found is None:
        raise ArtefactError(
            f"this version of torch has no operation {name}. Use the version the result was saved with, and import "
            "the library that defines it."
        )
    if library == "aten" and not _is_allowed(found):
        raise ArtefactError(f"the graph calls {name}, which no saved graph may. Do not trust this folder.")
    return found


def _find(library: str, *parts: str) -> OpOverload | None:
    """The overload of exactly that name, found by looking and never by running anything."""
    if len(parts) != 2 or not all(part.isidentifier() and part.isascii() for part in parts):
        return None
    try:
        found = getattr(getattr(getattr(torch.ops, library), parts[0]), parts[1])
    except (AttributeError, RuntimeError):
        return None
    is_it = isinstance(found, OpOverload) and str(found) == f"{library}.{parts[0]}.{parts[1]}"
    return found if is_it else None


def _is_allowed(target: OpOverload) -> bool:
    name = target._schema.name.removeprefix("aten::")
    twin = name.removesuffix("_") if not name.endswith("__") else name
    is_listed = name in _PURE or twin in _PURE or name in known_operators() or twin in known_operators()
    if not is_listed and torch.Tag.pointwise not in target.tags:
        return False
    return not any(argument.is_out or _is_written(argument) for argument in target._schema.arguments[1:])


def _is_written(argument: Any) -> bool:
    return argument.alias_info is not None and argument.alias_info.is_write


def _unsaved(name: str) -> ArtefactError:
    return ArtefactError(
        f"the operation {name} is none that a saved graph may hold, so the standalone result cannot be saved. Prune "
        "with keep_class=True, or report the model."
    )
