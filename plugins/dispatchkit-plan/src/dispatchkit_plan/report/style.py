"""Colors and fonts of reports, for light and dark color schemes."""

from __future__ import annotations

__all__ = ["DARK", "FONT", "LIGHT", "PAGE", "PLOT"]

LIGHT = """
--page:#f4f5f7;--card:#fff;--ink:#1a1f26;--soft:#56606c;--line:#e2e5ea;--edge:#d8dce2;
--full:#2a66c8;--piecewise:#12937f;--eager:#d9622b;--padding:#e3a72f;--other:#7b61c4;
--track:#eef0f3;--shade:rgba(20,30,45,.16);
"""
DARK = """
--page:#0e1116;--card:#171b22;--ink:#e7ebf0;--soft:#9aa6b4;--line:#29303a;--edge:#262d37;
--full:#5f96f2;--piecewise:#37bda6;--eager:#f08650;--padding:#d9a53e;--other:#a78bf0;
--track:#20262f;--shade:rgba(0,0,0,.6);
"""
FONT = 'system-ui,-apple-system,"Segoe UI",Roboto,"Helvetica Neue",Arial,sans-serif'
# Styles of plots, whether they are part of a page or separate files.
PLOT = """
svg text{font-family:inherit;font-size:12px;fill:var(--soft)}
svg .name{fill:var(--ink)}
.mark{shape-rendering:auto}rect.mark{shape-rendering:crispEdges}
.grid{stroke:var(--line)}.base{stroke:var(--soft)}.stroke{stroke:var(--edge);stroke-width:2}
.leader{stroke:var(--soft);stroke-width:.8}
.track{fill:var(--track)}
.mark.full{fill:var(--full)}.mark.piecewise{fill:var(--piecewise)}
.mark.eager{fill:var(--eager)}.mark.padding{fill:var(--padding)}.mark.other{fill:var(--other)}
.mark.line{fill:none;stroke-width:2.5;stroke-linejoin:round}
.mark.line.full{stroke:var(--full)}.mark.line.other{stroke:var(--other)}
.mark.dot{stroke:var(--card);stroke-width:2}
""".replace("\n", "")
PAGE = f"""
:root{{{LIGHT}}}
@media (prefers-color-scheme:dark){{:root{{{DARK}}}}}
*{{box-sizing:border-box}}
html{{-webkit-text-size-adjust:100%}}
body{{margin:0;background:var(--page);color:var(--ink);
font:15px/1.5 {FONT}}}
header,main,footer{{max-width:1200px;margin:0 auto;padding:0 20px}}
header{{padding-top:30px}}
h1{{font-size:26px;line-height:1.25;margin:0 0 6px;font-weight:650;letter-spacing:-.01em;
overflow-wrap:anywhere}}
h2{{font-size:16px;line-height:1.3;margin:0 0 4px;font-weight:620}}
p{{margin:0 0 10px}}
.summary{{font-size:17px;max-width:76ch;color:var(--ink)}}
dl{{display:flex;flex-wrap:wrap;gap:4px 28px;margin:0 0 18px;color:var(--soft);font-size:14px}}
dl div{{display:flex;gap:7px;min-width:0}}
dt{{flex:none}}dt::after{{content:":"}}
dd{{margin:0;color:var(--ink);overflow-wrap:anywhere}}
.tiles{{display:grid;grid-template-columns:repeat(auto-fit,minmax(165px,1fr));gap:14px;
margin-bottom:16px}}
.tile,.card{{background:var(--card);border:1px solid var(--edge);border-radius:10px}}
.tile{{padding:12px 16px 13px;display:flex;flex-direction:column;min-width:0}}
.tile .what{{color:var(--soft);font-size:13px}}
.tile strong{{font-size:25px;line-height:1.25;font-weight:640;font-variant-numeric:tabular-nums}}
.tile .note,.note{{color:var(--soft);font-size:13px;margin:0}}
.figures{{display:grid;grid-template-columns:repeat(2,minmax(0,1fr));gap:16px;align-items:start}}
.card{{margin:0;padding:16px 18px;min-width:0}}
main>.card{{margin-top:16px}}
.figures>.card{{height:100%}}
.figures>.missing{{grid-column:1/-1;height:auto}}
figcaption,.card>p{{color:var(--soft);font-size:14px;margin-bottom:10px}}
.missing{{border-style:dashed;background:none}}
.legend{{list-style:none;display:flex;flex-wrap:wrap;gap:3px 18px;margin:0 0 8px;padding:0;
font-size:13px;color:var(--soft)}}
.legend li{{display:flex;align-items:center;gap:7px}}
.swatch{{width:11px;height:11px;border-radius:3px;background:currentColor;flex:none}}
.swatch.full{{color:var(--full)}}.swatch.piecewise{{color:var(--piecewise)}}
.swatch.eager{{color:var(--eager)}}.swatch.padding{{color:var(--padding)}}
.swatch.other{{color:var(--other)}}
.plot svg{{display:block;width:100%;height:auto;overflow:visible}}
.plot.narrow{{display:none}}
{PLOT}
details{{margin-top:10px;font-size:13px}}
summary{{cursor:pointer;color:var(--soft);width:max-content}}
code{{font:.92em ui-monospace,Menlo,Consolas,monospace;color:var(--ink)}}
.scroll{{overflow-x:auto;max-height:420px;overflow-y:auto;margin-top:8px;
background:linear-gradient(to right,var(--card) 40%,transparent) left/36px 100% no-repeat local,
linear-gradient(to left,var(--card) 40%,transparent) right/36px 100% no-repeat local,
linear-gradient(to top,var(--card) 40%,transparent) bottom/100% 36px no-repeat local,
linear-gradient(to right,var(--shade),transparent) left/14px 100% no-repeat scroll,
linear-gradient(to left,var(--shade),transparent) right/14px 100% no-repeat scroll,
linear-gradient(to top,var(--shade),transparent) bottom/100% 14px no-repeat scroll}}
table{{border-collapse:collapse;font-size:13px;width:100%;font-variant-numeric:tabular-nums}}
th{{text-align:left;font-weight:600;color:var(--soft);position:sticky;top:0;
background:var(--card);white-space:nowrap}}
th,td{{padding:5px 14px 5px 0;border-bottom:1px solid var(--line);vertical-align:top}}
td{{white-space:nowrap}}td.long{{white-space:normal;min-width:17em;overflow-wrap:anywhere}}
.right{{text-align:right;white-space:nowrap}}
main ul{{margin:0}}
main .card>ul:not(.legend){{padding-left:20px;color:var(--soft);font-size:14px}}
footer{{color:var(--soft);font-size:13px;padding:20px}}
@media (max-width:1000px){{.figures{{grid-template-columns:minmax(0,1fr)}}
.plot svg{{max-width:680px}}}}
@media (max-width:560px){{header,main,footer{{padding-left:12px;padding-right:12px}}
header{{padding-top:18px}}h1{{font-size:21px}}.summary{{font-size:16px}}
.card{{padding:14px 12px}}.tiles{{grid-template-columns:repeat(2,minmax(0,1fr));gap:10px}}
.figures{{gap:12px}}.tile{{padding:10px 12px}}.tile strong{{font-size:21px}}
.plot.wide{{display:none}}.plot.narrow{{display:block}}}}
@media print{{body{{background:#fff}}.card,.tile{{break-inside:avoid}}}}
""".replace("\n", "")
