"""Along what an operator can be run in parts: its axes, by rules that read a node's arguments. No torch.

    axes_of(node) -> Axis*                                                                     ../nodes.py; () where nothing is known

An **axis** is one index that an operator loops over, as in einsum: mm(a, b) = sum over k of a[m, k] b[k, n] has three. To run a node in
parts along an axis is to run it once for each piece of [0, extent), in any number of pieces of any whole sizes:

    for start, stop in pieces:                        # of [0, axis.extent)
        for path, dim in axis.sliced:                 # arguments that are sliced: those that the axis does not name are whole
            of `argument(node, path)` take along `dim` the same share: [start, stop) * shape[dim] // extent
        for path in axis.sizes:                       # arguments that hold an extent
            take the same share of the number: number * (stop - start) // extent
        for path, arg in axis.instead:                # arguments that are another in every part
            take `arg`
        run the operator; for each of `node.results`, the outputs that exist, then what was written:
            a dimension  the part's result is the same share of the whole result along it
            Reduced(SUM)     add it to the parts before it; MAX, MIN, PRODUCT, ANY and ALL likewise
            Reduced(MEAN)    add it times (stop - start) / extent
            Reduced(SAME)    every part gives the same: keep one
    for Reduced(SUM, over=i):                         # after the last part
            divide by the combined result i

So all extents along an axis are multiples of `axis.extent`, and parts of neighbouring operators fit where they take the same share. A
path is the position of an argument: (1,) is args[1], (0, 2) is args[0][2], ("weight",) a keyword; `with_arguments` puts others there.

A node that writes (`node.writes`) writes into the same slice of what it is given: `sliced` names that argument.

What no axis names is **closed**: the dimension that a softmax or norm normalises, what a convolution looks around in, all of an operator
that has no rule or draws random numbers. A reshape has an axis for the outermost of each group of merged dimensions, of as many units as
both sides divide into; an extent of 1 has none.

Parts give the numbers of the whole operator, not its bits: kernels choose their way by size, and sums are taken in another order.
Results that are whole numbers or truth values are exact, but for those that were sums of floating point before.

(MAGIS, section 4.1: sliced dimensions are its spatial axes, reduced ones its reduce axes.)
"""
