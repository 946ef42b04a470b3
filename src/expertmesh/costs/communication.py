"""Model of the time that tokens and weights take between ranks, by latency and bandwidth of each class of link.

A link moves b bytes in alpha + b / beta seconds. There are two classes: between ranks of one node, and between nodes. A
node's ranks share its link to the others. All numbers are expectations for tokens that choose K different experts,
given each expert's share of all choices.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import groupby
from typing import NamedTuple


@dataclass(frozen=True)
class Link:
    """Latency and bandwidth of a class of links."""

    latency_s: float  # alpha, seconds of a message of no bytes
    bytes_per_s: float  # beta, bandwidth of one direction


@dataclass(frozen=True)
class Network:
    """Links between ranks."""

    inside: Link  # link of a rank to the others of its node
    across: Link  # link of a node to the others; its ranks share it


SECOND_HOP = 1.08
"""Ratio of modelled times from which hierarchical is chosen over flat: ranks spend time on its second hop, too."""
USUAL_NETWORK = Network(Link(1e-4, 1e9), Link(3e-4, 1e8))
"""Network that is assumed without measurements (of `expertmesh bench comm`): orders of magnitude only."""


def assumed_links(network: Network) -> tuple[str, ...]:
    """Names of the links that are assumed, because there were none to measure."""
    names = ("inside", "across")
    return tuple(n for n in names if getattr(network, n) == getattr(USUAL_NETWORK, n))


@dataclass(frozen=True)
class RouteShape:
    """Ranks over which tokens travel with one route_degree."""

    route_degree: int  # r
    # the block of experts that each of the r ranks computes; the slices of a block have the same
    blocks: tuple[int, ...]
    num_blocks: int  # number of blocks of experts, equally large, in the order of the experts
    nodes: tuple[int, ...]  # the node of each of the r ranks
    num_gathering: int = 1  # number of ranks that gather the same weights from one another
    gathers_across: bool = False  # whether these ranks are on several nodes

    @cached_property
    def members(self) -> dict[int, tuple[int, ...]]:
        """Positions of each node's ranks in the route."""
        places = sorted(range(len(self.nodes)), key=self.nodes.__getitem__)
        return {node: tuple(each) for node, each in groupby(places, self.nodes.__getitem__)}

    @property
    def has_two_levels(self) -> bool:
        """Whether there are several nodes, and several ranks on one of them."""
        return 1 < len(self.members) < len(self.nodes)


@dataclass(frozen=True)
class TokenLoad:
    """The tokens of one call of a layer, on average over its ranks."""

    num_tokens: float  # tokens per rank
    top_k: int
    # share of all choices that falls on each expert; sums to 1 or, where some choices do not travel, to less
    shares: tuple[float, ...]
    merges: bool = True  # whether a token with several experts on a rank is sent there once; False: once for each

    @staticmethod
    def even(num_tokens: float, top_k: int, num_experts: int) -> "TokenLoad":
        """A load spread evenly over all experts."""
        return TokenLoad(num_tokens, top_k, (1 / num_experts,) * num_experts)

    def chance(self, share: float) -> float:
        """Probability that a token chooses one of some experts, given their share of all choices; without merging, its
        mean choices there.

        1 - prod over j < K of (1 - share E / (E - j)): exact for even choices without repetition, (E - n choose K) /
        (E choose K) tokens having none of n experts.
        """
        if not self.merges:
            return self.top_k * share
        none, E = 1.0, len(self.shares)
        for j in range(min(self.top_k, E)):
            none *= max(0.0, 1 - share * E / (E - j))
        return 1 - none

    def without(self, experts: Sequence[int]) -> "TokenLoad":
        """The load without the choices of some experts, whose tokens do not travel."""
        left = tuple(0.0 if e in experts else share for e, share in enumerate(self.shares))
        return replace(self, shares=left)

    def block_shares(self, num_blocks: int) -> list[float]:
        """Share of all choices of each of `num_blocks` equal blocks of experts."""
        size = len(self.shares) // num_blocks
        return [sum(self.shares[b * size : (b + 1) * size]) for b in range(num_blocks)]


@dataclass(frozen=True)
class Copies:
    """Rows that one dispatch moves; combine moves as many back."""

    inside: float  # most rows that a rank sends to, or gets from, ranks of its node
    across: float  # most rows that a node sends to, or gets from, other nodes
    inside_messages: int  # most messages of a rank to its node
    across_messages: int  # most messages of a rank to other nodes

    def seconds(self, network: Network, row_bytes: float, *, parts: int = 1) -> "TravelTime":
        """Time of a dispatch or a combine, in so many parts."""
        inside, across = network.inside, network.across
        return TravelTime(
            parts * self.inside_messages * inside.latency_s + self.inside * row_bytes / inside.bytes_per_s,
            parts * self.across_messages * across.latency_s + self.across * row_bytes / across.bytes_per_s,
        )


class TravelTime(NamedTuple):
    """Seconds of dispatch and combine, by kind of link."""

    inside_s: float  # seconds within nodes
    across_s: float  # seconds between nodes

    @property
    def total_s(self) -> float:
        """Sum of both, which follow one another."""
        return self.inside_s + self.across_s


def flat_copies(route: RouteShape, load: TokenLoad) -> Copies:
    """Rows of the flat all-to-all: a token goes once to each rank that has its experts."""
    P, T = len(route.nodes), load.num_tokens
    shares = _place_shares(route, load)
    chance_of = {share: load.chance(share) for share in set(shares)}
    chances = [chance_of[share] for share in shares]
    total, inside, across = sum(chances), 0.0, 0.0
    for members in route.members.values():
        here = sum(chances[p] for p in members)
        n = len(members)
        across = max(across, T * n * (total - here), T * (P - n) * here)
        inside = max(inside, *(T * max(here - chances[p], (n - 1) * chances[p]) for p in members))
    widest = max(map(len, route.members.values()))
    return Copies(inside, across, widest - 1, P - min(map(len, route.members.values())))


def hierarchical_copies(route: RouteShape, load: TokenLoad) -> Copies:
    """Rows of the hierarchical all-to-all: a token goes once to each node that has its experts, then on to the ranks
    there."""
    P, T = len(route.nodes), load.num_tokens
    places, blocks = _place_shares(route, load), load.block_shares(route.num_blocks)
    chance_of = {share: load.chance(share) for share in set(places)}
    node_chances = {
        node: load.chance(sum(blocks[b] for b in {route.blocks[p] for p in members}))
        for node, members in route.members.items()
    }
    total, inside, across = sum(node_chances.values()), 0.0, 0.0
    for node, members in route.members.items():
        n, chances = len(members), [chance_of[places[p]] for p in members]
        others = total - node_chances[node]
        across = max(across, T * n * others, T * (P - n) * node_chances[node])
        # Each rank of the node receives an equal share of all ranks' tokens and hands them on.
        handed = T * P / n
        inside = max(inside, *(handed * max(sum(chances) - c, (n - 1) * c) for c in chances))
    widest = max(map(len, route.members.values()))
    return Copies(inside, across, widest - 1, len(route.members) - 1)


def _place_shares(route: RouteShape, load: TokenLoad) -> list[float]:
    blocks = load.block_shares(route.num_blocks)
    return [blocks[b] for b in route.blocks]


def travel_seconds(
    kind: str,
    route: RouteShape,
    load: TokenLoad,
    network: Network,
    *,
    dim: int,
    element_bytes: int,
    out_bytes: int | None = None,
    parts: int = 1,
) -> float:
    """Seconds of dispatch and combine of one forward; the gradients of a backward take as long again.

    The sum of `travel_time`, whose arguments it takes.
    """
    return travel_time(
        kind,
        route,
        load,
        network,
        dim=dim,
        element_bytes=element_bytes,
        out_bytes=out_bytes,
        parts=parts,
    ).total_s


def travel_time(
    kind: str,  # "flat" or "hierarchical"
    route: RouteShape,  # the ranks
    load: TokenLoad,
    network: Network,  # the links
    *,
    dim: int,  # D
    element_bytes: int,  # bytes of an element of a token
    out_bytes: int | None = None,
    parts: int = 1,  # number of parts that tokens travel in, each with messages of its own
) -> TravelTime:
    """Time of dispatch and combine of one forward, within nodes and between them.

    Args:
        out_bytes: bytes of a dispatched token, where it is sent in another type; None: dim x element_bytes.
    """
    if len(route.nodes) == 1:
        return TravelTime(0.0, 0.0)
    two_levels = kind == "hierarchical" and route.has_two_levels
    copies = (hierarchical_copies if two_levels else flat_copies)(route, load)
    home_bytes = dim * element_bytes
    there_bytes = (home_bytes if out_bytes is None else out_bytes) + 2 * load.top_k * 4
    there, home = (copies.seconds(network, size, parts=parts) for size in (there_bytes, home_bytes))
    return TravelTime(there.inside_s + home.inside_s, there.across_s + home.across_s)


def faster_all_to_all(
    route: RouteShape,
    load: TokenLoad,
    network: Network,
    *,
    dim: int,
    element_bytes: int,
    out_bytes: int | None = None,
) -> str:
    """ "flat" or "hierarchical", whichever the model says is faster; flat where the difference is within
    `SECOND_HOP`."""

    def seconds(kind: str) -> float:
        sizes = {"dim": dim, "element_bytes": element_bytes}
        return travel_seconds(kind, route, load, network, **sizes, out_bytes=out_bytes)

    return "hierarchical" if SECOND_HOP * seconds("hierarchical") < seconds("flat") else "flat"


def ring_seconds(num_bytes: float, num_ranks: int, link: Link) -> float:
    """Seconds of a ring all-gather or reduce-scatter of so many bytes in all."""
    if num_ranks == 1 or not num_bytes:
        return 0.0
    step = num_bytes / num_ranks / link.bytes_per_s + link.latency_s
    return (num_ranks - 1) * step


@dataclass(frozen=True)
class ExchangeCost:
    """Messages and bytes that one rank of an engine sends for one MoE layer in a step."""

    messages: int  # number of messages to other ranks, dispatch and combine
    num_bytes: int  # bytes of all messages
    across_bytes: int  # bytes of the messages to ranks that do not have the same tokens


def coordinated_exchange(
    num_ranks: int,  # p
    *,
    tp_degree: int,  # L, number of ranks with the same tokens
    is_split: bool,  # whether these ranks have the same experts, so that each sends its part of the tokens
    num_tokens: int,  # tokens of the group that has most
    dim: int,  # D
    top_k: int,  # K; a weight and an id of 4 bytes each travel out with every token
    element_bytes: int,  # bytes of an element of a token
) -> ExchangeCost:
    """Cost of the coordinated all-to-all (DeepSpeed-MoE, arXiv 2201.05596, 5.3): p / L ranks there and back, then L
    ranks."""
    column, each = num_ranks // tp_degree, num_tokens
    if is_split:
        each = -(-num_tokens // tp_degree)
    home = each * dim * element_bytes
    across = (column - 1) * (home + each * 8 * top_k + home)
    return ExchangeCost(2 * (column - 1) + tp_degree - 1, across + (tp_degree - 1) * home, across)


def wide_exchange(num_ranks: int, *, num_tokens: int, dim: int, top_k: int, element_bytes: int) -> ExchangeCost:
    """Cost of a plain all-to-all, where ranks with the same tokens each send them to all ranks."""
    sizes = {"num_tokens": num_tokens, "dim": dim, "top_k": top_k, "element_bytes": element_bytes}
    return coordinated_exchange(num_ranks, tp_degree=1, is_split=False, **sizes)
