"""Lets operators on the DTensors of a program work as on one device, or raise an error."""

from __future__ import annotations

from autopar.runtime.communication.mesh import Mesh
from autopar.runtime.dtensors.program_handlers import add_program_mesh
from autopar.runtime.dtensors.random_fill import install_random_fill
from autopar.runtime.dtensors.scalar_reads import install_scalar_reads
from autopar.runtime.dtensors.view_writes import install_view_writes


def install_handlers(mesh: Mesh) -> None:
    """From now on torch's dispatcher knows the handlers, and that ``mesh`` is a program's."""
    add_program_mesh(mesh)
    install_random_fill()
    install_scalar_reads()
    install_view_writes()
