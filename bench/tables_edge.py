"""The sections of the results page on small devices."""

from __future__ import annotations

from bench.tables_parts import rows_of, section


def small_devices() -> tuple[str, ...]:
    """One memory and two, then cuts in each."""
    return _memories(), _cuts(), _cuts_in_two()


def _memories() -> str:
    rows = rows_of("edge")
    lines = [
        [
            row["network"], str(row["operators"]), f"{row['TFLM bytes']:,}", f"{row['best fit bytes']:,}", f"{row['ExecuTorch bytes']:,}",
            f"{row['lowtide bytes']:,}", _gap(row["gap"]), f"{row['seconds']:.1f}", f"{row['banked greedy us']:,.0f}",
            f"{row['half fast: us']:,.0f}", _gap(row["gap of it"]), f"{row['banked greedy slow bytes']:,}", f"{row['slow bytes']:,}",
            f"{row['least slow bytes']:,}", _gap(row["gap of these"]), f"{row['seconds of it']:.1f}",
        ]
        for row in rows
    ]  # fmt: skip
    head = (
        "", "operators", "TFLM", "best fit", "ExecuTorch", "lowtide", "gap", "seconds", "banked greedy, us", "lowtide, us", "gap",
        "banked greedy, slow bytes", "lowtide, slow bytes", "least slow bytes", "gap", "seconds",
    )  # fmt: skip
    proven = sum(row["gap"] == 0 for row in rows)
    return section(
        "Small devices",
        "edge",
        "python -m bench.edge FOLDER_OF_MLPERF_TINY",
        "Bytes of one memory, beside other planners written from their descriptions. Then two memories: half of lowtide's bytes are fast"
        " (2 GB/s), the rest is slow (0.2 GB/s), with a DMA. Times are the stated model's, no device was measured; slow bytes are read or"
        " written in the slow memory, in the plan of least time, and in one that was asked for the fewest of them. Seconds are the"
        " processor's, for the least bytes and for the least time. MLPerf Tiny and the vision networks are in"
        " int8, the irregular networks in float32.",
        head,
        lines,
        after=f"In one memory {proven} of {len(rows)} are proven to be least.",
    )


def _cuts() -> str:
    rows = rows_of("edge_cuts")
    lines = [
        [
            row["network"], f"{row['multiplications at most']:.3f}", f"{row['msf-CNN bytes']:,}", f"{row['bytes']:,}",
            f"{row['bound bytes']:,}", f"{row['multiplications']:.3f}", f"{row['with additions bytes']:,}",
            f"{row['with additions bound bytes']:,}",
        ]
        for row in rows
    ]  # fmt: skip
    right = sum(row["run like onnxruntime"] == "yes" for row in rows)
    head = ("", "multiplications at most", "msf-CNN", "lowtide", "bound", "multiplications", "with additions", "bound")
    return section(
        "Small devices: cuts",
        "edge_cuts",
        "python -m bench.edge_cuts",
        "Bytes of RAM in int8 with at most so many multiplications, of those where nothing is cut, beside the points that msf-CNN publishes"
        " (arXiv 2505.11483). The networks are its chains, without residual additions; the image stays with the caller, as it counts. The"
        " first line of each network is without cuts. The last two columns are of the same networks with their residual additions.",
        head,
        lines,
        after=f"Run in exactly these bytes, {right} of {len(rows)} pairs of plans gave onnxruntime's integers. The bound is over all"
        " cuts of up to 64 operators that follow each other, in slices along rows, columns or channels, in bands of one size.",
    )


def _cuts_in_two() -> str:
    rows = rows_of("edge_cuts_two")
    lines = [
        [
            row["network"], str(row["operators"]), f"{row['fast bytes']:,}", f"{row['whole us']:,.0f}", _gap(row["gap of it"]),
            f"{row['us']:,.0f}", _gap(row["gap"]), str(row["cuts"]), str(row["moves"]), f"{row['multiplications']:.3f}",
            f"{row['seconds']:.1f}",
        ]
        for row in rows
    ]  # fmt: skip
    head = ("", "operators", "fast bytes", "nothing cut, us", "gap", "cut, us", "gap", "cuts", "moves", "multiplications", "seconds")
    return section(
        "Small devices: cuts in two memories",
        "edge_cuts_two",
        "python -m bench.edge_cuts",
        "Time by the stated model with a small fast memory (2 GB/s) beside a slow one (0.2 GB/s), a DMA and 4 billion multiplications a"
        " second. Order, places, moves and cuts are one search, with one bound. What goes through rings counts as time. Networks in int8"
        " with their residual additions; the image stays with the caller.",
        head,
        lines,
        after=f"Run in exactly their bytes, {sum(row['run like onnxruntime'] == 'yes' for row in rows)} of {len(rows)} cut plans gave"
        " onnxruntime's integers.",
    )


def _gap(gap: float) -> str:
    return f"{gap:.1%}" if gap else "proven"
