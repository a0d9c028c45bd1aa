"""Where a convolutional network looks: Grad-CAM, and the share of it that falls on a region."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from samkit._arguments import fraction, integer

__all__ = ["grad_cam", "regions", "share"]


def grad_cam(model: nn.Module, layer: nn.Module, images: Tensor, labels: Tensor) -> Tensor:
    r"""The Grad-CAM map of each image for one class each.

    .. math::
        M(u) = \max\Bigl(0, \sum_k a_k A_k(u)\Bigr), \qquad
        a_k = \frac{1}{|U|} \sum_{u \in U} \frac{\partial f_y}{\partial A_k(u)}

    with :math:`A_k(u)` channel k of the layer's output at place u and :math:`f_y` the score of class y.

    Parameters
    ----------
    model : torch.nn.Module
        A network that treats every image by itself and returns scores ``(n, classes)``.
    layer : torch.nn.Module
        The part of it whose output ``(n, channels, height, width)`` is explained.
    images : torch.Tensor
        Images ``(n, colours, H, W)``.
    labels : torch.Tensor
        The class to explain of each image, ``(n,)``, int64.

    Returns
    -------
    torch.Tensor
        Maps ``(n, height, width)``, not negative, as large as the layer's output.

    Raises
    ------
    TypeError
        If the images are not floating-point or the labels not int64 tensors.
    ValueError
        If there is not one label for each image, a label is no class, the model does not run the layer
        exactly once on the way to its scores, or the layer's output has no height and width.

    Examples
    --------
    The score is the sum of one channel that copies the image: each pixel counts by its brightness.

    >>> import torch
    >>> from samkit.attribution import grad_cam
    >>> copy = torch.nn.Identity()
    >>> model = torch.nn.Sequential(copy, torch.nn.Flatten(), torch.nn.Linear(4, 1, bias=False))
    >>> _ = torch.nn.init.ones_(model[2].weight)
    >>> grad_cam(model, copy, torch.tensor([[[[0.0, 1.0], [2.0, -3.0]]]]), torch.tensor([0])).tolist()
    [[[0.0, 1.0], [2.0, 0.0]]]

    Notes
    -----
    Selvaraju et al. 2017, arXiv 1610.02391, equations 1 and 2. Used in chapter 8.
    """
    _check_floating(images)
    if not isinstance(labels, Tensor) or labels.dtype != torch.int64:
        raise TypeError(f"labels must be an int64 tensor, such as torch.tensor([0, 1]); got {labels!r}")
    if labels.shape != images.shape[:1]:
        raise ValueError(f"one label for each of {len(images)} images, got shape {tuple(labels.shape)}")
    kept: list[Tensor] = []

    def keep(_module: nn.Module, _inputs: tuple, output: Tensor) -> Tensor:
        kept.append(output)
        return output.clone()  # what follows may write into it, as nn.ReLU(inplace=True) does

    handle = layer.register_forward_hook(keep)
    try:
        with torch.enable_grad():
            scores = model(images.detach().requires_grad_())
            if len(labels) and not 0 <= labels.min() <= labels.max() < scores.shape[1]:
                raise ValueError(
                    f"labels must lie between 0 and {scores.shape[1] - 1}, the classes of the scores; they "
                    f"run from {labels.min()} to {labels.max()}"
                )
            total = scores.gather(1, labels[:, None]).sum()
    finally:
        handle.remove()
    if len(kept) != 1:
        raise ValueError(f"the model must run the layer once, but ran it {len(kept)} times: {layer}")
    (activations,) = kept
    if activations.ndim != 4:
        raise ValueError(f"Grad-CAM needs a layer with height and width, got {tuple(activations.shape)}")
    (slopes,) = torch.autograd.grad(total, activations, allow_unused=True)
    if slopes is None:
        raise ValueError(f"the scores do not depend on the layer: {layer}")
    importance = slopes.mean(dim=(2, 3), keepdim=True)
    return (importance * activations).sum(dim=1).relu().detach()


def regions(
    images: Tensor, *, threshold: float = 0.5, faint: float = 0.1, reach: int = 4
) -> dict[str, Tensor]:
    r"""Split each image into its strokes and its background, the background in two ways.

    A pixel's contrast is its distance from the image's median colour, divided by the largest such distance.
    Strokes have a contrast above ``threshold``; background is everything else; and ``far`` is what lies more
    than ``reach`` pixels, in rows or columns, from every pixel with a contrast above ``faint``.

    Parameters
    ----------
    images : torch.Tensor
        Images ``(n, colours, H, W)``.
    threshold, faint : float
        Contrasts between 0 and 1.
    reach : int
        Pixels, at least 0.

    Returns
    -------
    dict of str to torch.Tensor
        Under ``"strokes"``, ``"background"`` and ``"far"`` a mask ``(n, H, W)`` each.

    Raises
    ------
    TypeError
        If the images are not floating-point tensors, or ``reach`` is not an integer.
    ValueError
        If ``images`` is not a batch of finite images, or a number is out of range.

    Examples
    --------
    >>> import torch
    >>> from samkit.attribution import regions
    >>> line = torch.zeros(1, 1, 5, 12)
    >>> line[..., 0] = 1.0
    >>> {name: int(mask.sum()) for name, mask in regions(line).items()}
    {'strokes': 5, 'background': 55, 'far': 35}

    Notes
    -----
    Chosen here; derived and discussed in chapter 8. A digit's median colour is the empty paper.
    """
    _check_floating(images)
    if images.ndim != 4:
        raise ValueError(f"images must have shape (n, colours, H, W), got {tuple(images.shape)}")
    if not images.isfinite().all():
        raise ValueError("images must be finite, got NaN or infinity: the median colour would mean nothing")
    threshold, faint = fraction("threshold", threshold), fraction("faint", faint)
    reach = integer("reach", reach, 0)
    middle = images.flatten(2).median(dim=2).values[:, :, None, None]
    contrast = (images - middle).norm(dim=1)
    contrast = contrast / contrast.amax(dim=(1, 2), keepdim=True).clamp(min=1e-12)
    strokes = contrast > threshold
    marked = (contrast > faint).to(images.dtype)[:, None]
    near = nn.functional.max_pool2d(marked, 2 * reach + 1, stride=1, padding=reach)[:, 0] > 0
    return {"strokes": strokes, "background": ~strokes, "far": ~near}


def share(maps: Tensor, mask: Tensor) -> Tensor:
    r"""The share of each map that lies on a region: :math:`\sum_{u \in R} M(u) / \sum_u M(u)`.

    Maps are first enlarged to the size of the mask (bilinear).

    Parameters
    ----------
    maps : torch.Tensor
        Maps ``(n, h, w)``, not negative.
    mask : torch.Tensor
        The region in each image, ``(n, H, W)``, bool.

    Returns
    -------
    torch.Tensor
        Shares ``(n,)`` between 0 and 1; NaN where a map is zero everywhere.

    Raises
    ------
    TypeError
        If the maps are not floating-point or the masks not bool tensors.
    ValueError
        If they do not have three dimensions, or the numbers of maps and masks differ.

    Examples
    --------
    >>> import torch
    >>> from samkit.attribution import share
    >>> share(torch.ones(1, 2, 2), torch.tensor([[[True, False], [False, False]]])).tolist()
    [0.25]
    """
    _check_floating(maps, "maps")
    if not isinstance(mask, Tensor) or mask.dtype != torch.bool:
        raise TypeError(f"mask must be a bool tensor, such as one of regions(images); got {mask!r}")
    if maps.ndim != 3 or mask.ndim != 3:
        raise ValueError(
            f"maps must have shape (n, h, w) and mask (n, H, W), got {tuple(maps.shape)} and "
            f"{tuple(mask.shape)}"
        )
    if len(maps) != len(mask):
        raise ValueError(f"one mask for each of {len(maps)} maps, got {len(mask)}")
    size = tuple(mask.shape[1:])
    full = nn.functional.interpolate(maps[:, None], size, mode="bilinear", align_corners=False)[:, 0]
    return (full * mask).sum(dim=(1, 2)) / full.sum(dim=(1, 2))


def _check_floating(tensor: Tensor, name: str = "images") -> None:
    if not isinstance(tensor, Tensor) or not tensor.is_floating_point():
        raise TypeError(f"{name} must be a floating-point tensor (tensor.float()), got {tensor!r}")
