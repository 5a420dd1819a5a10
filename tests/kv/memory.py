"""Memory that plans really write, copy and swap, so that a wrong block shows in what is read back."""

from tests.fakes.worker import kv_value

POOLS = ("target", "draft")
GARBAGE = ("garbage", ())


class Memory:
    """Device and host memory of both pools: one value a position."""

    def __init__(self, size, blocks, slots):
        """`blocks`, `slots`: device and host blocks of each pool."""
        self.size = size
        self.device = {pool: [None] * (blocks[pool] * size) for pool in POOLS}
        self.host = {pool: [None] * (slots[pool] * size) for pool in POOLS}

    def clone(self):
        other = Memory(self.size, dict.fromkeys(POOLS, 0), dict.fromkeys(POOLS, 0))
        other.device = {pool: list(self.device[pool]) for pool in POOLS}
        other.host = {pool: list(self.host[pool]) for pool in POOLS}
        return other

    def _move(self, to, dst, source, src):
        to[dst * self.size : (dst + 1) * self.size] = source[src * self.size : (src + 1) * self.size]

    def copy(self, copies):
        for one in copies:
            self._move(self.device[one.pool], one.dst, self.device[one.pool], one.src)

    def swap(self, outs, ins):
        for one in outs:
            self._move(self.host[one.pool], one.host, self.device[one.pool], one.device)
        for one in ins:
            self._move(self.device[one.pool], one.device, self.host[one.pool], one.host)

    def fail(self, outs, ins, copies):
        """The ends of moves that may have run, or in part."""
        ends = [(self.host[one.pool], one.host) for one in outs]
        ends += [(self.device[one.pool], one.device) for one in ins]
        ends += [(self.device[one.pool], one.dst) for one in copies]
        for memory, block in ends:
            memory[block * self.size : (block + 1) * self.size] = [GARBAGE] * self.size

    def write(self, table, position, value):
        block = table.block_ids[position // self.size]
        self.device[table.name][block * self.size + position % self.size] = value

    def read(self, table, position, copied):
        """What `position` of a table holds. `copied`: its pending copy ran."""
        if table.swapped:
            return self.host[table.name][table.slots[position // self.size] * self.size + position % self.size]
        block = home(table, position, self.size, copied)
        return self.device[table.name][block * self.size + position % self.size]

    def block(self, pool, block):
        return self.device[pool][block * self.size : (block + 1) * self.size]


def home(table, position, size, copied=False):
    """The device block that holds `position`. A pending copy's source does, until the copy ran."""
    pending = table.pending_source
    if pending is not None and not copied and position // size == table.committed // size:
        return pending
    return table.block_ids[position // size]


def held(tables, size):
    """Distinct device blocks with committed tokens."""
    return {home(table, position, size) for table in tables for position in range(table.committed)}


def text_kv(namespace, tokens, start, end):
    """The right KV of positions start .. end."""
    return [kv_value(namespace, tokens, position) for position in range(start, end)]
