# Serve a model from this checkout on Windows: scripts\serve.ps1 [MODEL] [--flags of minserve serve].
# Sets up .venv and fetches the model the first time. For an NVIDIA GPU set $env:EXTRAS = "cuda12" before.
$ErrorActionPreference = "Stop"
$root = Split-Path -Parent $PSScriptRoot
$python = Join-Path $root ".venv\Scripts\python.exe"
$stamp = Join-Path $root ".venv\installed-windows"
$wanted = (Get-FileHash (Join-Path $root "pyproject.toml")).Hash + $env:EXTRAS

if (-not (Test-Path $python)) {
    Write-Host "minserve: creating .venv"
    $found = if (Get-Command py -ErrorAction SilentlyContinue) { "py" } else { "python" }
    & $found -c "import sys; sys.exit(sys.version_info < (3, 11))"
    if ($LASTEXITCODE) { throw "minserve needs Python 3.11 or newer" }
    & $found -m venv (Join-Path $root ".venv")
    if ($LASTEXITCODE) { throw "could not create .venv" }
}
if (-not (Test-Path $stamp) -or (Get-Content $stamp) -ne $wanted) {
    Write-Host "minserve: installing (a minute or two, once)"
    $what = if ($env:EXTRAS) { "${root}[$($env:EXTRAS)]" } else { $root }
    & $python -m pip install --quiet --disable-pip-version-check --editable $what
    if ($LASTEXITCODE) { throw "the installation failed" }
    Set-Content $stamp $wanted
}
& (Join-Path $root ".venv\Scripts\minserve.exe") serve @args
exit $LASTEXITCODE
