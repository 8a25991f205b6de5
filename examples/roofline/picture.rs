//! The roofline as an SVG file: FLOP/s over arithmetic intensity, both logarithmic; a panel for each number of threads.

use std::error::Error;
use std::path::Path;

use plotters::coord::Shift;
use plotters::prelude::*;
use plotters::style::text_anchor::{HPos, Pos, VPos};

use crate::kernels::Point;
use crate::limits::{DRAM_BYTES, L2_BYTES, Limits, Rate};
use crate::report::size;

type Area<'a> = DrawingArea<SVGBackend<'a>, Shift>;
type Drawn = Result<(), Box<dyn Error>>;

/// Everything in pixels.
const PLOT: (i32, i32) = (600, 560);
const LEFT: i32 = 64;
const TOP: i32 = 84;
const BOTTOM: i32 = 56;
const LEGEND: i32 = 330;
/// Width of a column of the legend that has figures.
const FIGURES: i32 = 124;
/// Width of what stands right in it, the percentage.
const PERCENT: i32 = 56;
const LINE: i32 = 24;
const TEXT: i32 = 13;
/// The width of a character of a sans-serif font is at most 0.62 of its size, on average over a word.
const CHARACTER: f64 = 0.62 * TEXT as f64;
const RADIUS: i32 = 4;
const INK: RGBColor = RGBColor(34, 34, 34);
const GRID: RGBColor = RGBColor(228, 228, 228);
const ROOF: RGBColor = RGBColor(110, 110, 110);

/// From `low` to `high` over so many pixels, logarithmic.
#[derive(Clone, Copy)]
struct Axis {
    low: f64,
    high: f64,
    pixels: i32,
}

impl Axis {
    /// Powers of `base` around all values, with one more at either end.
    fn around(values: impl Iterator<Item = f64> + Clone, base: f64, pixels: i32) -> Self {
        let (low, high) = (values.clone().fold(f64::INFINITY, f64::min), values.fold(0.0, f64::max));
        let power = |x: f64| base.powf(x);
        Self { low: power(low.log(base).floor() - 1.0), high: power(high.log(base).ceil() + 1.0), pixels }
    }

    fn at(self, value: f64) -> i32 {
        ((value / self.low).ln() / (self.high / self.low).ln() * f64::from(self.pixels)).round() as i32
    }

    /// Powers of `base` on it.
    fn ticks(self, base: f64) -> impl Iterator<Item = f64> {
        let first = self.low.log(base).round();
        (0..).map(move |i| base.powf(first + f64::from(i))).take_while(move |&x| x <= self.high * 1.001)
    }
}

/// A rectangle: left, top, right, bottom.
type Rect = [i32; 4];

fn overlap(a: &Rect, b: &Rect) -> bool {
    a[0] < b[2] && b[0] < a[2] && a[1] < b[3] && b[1] < a[3]
}

struct Panel<'a, 'b> {
    area: &'a Area<'b>,
    corner: (i32, i32),
    x: Axis,
    y: Axis,
    /// What is occupied by markers and labels.
    taken: Vec<Rect>,
}

/// Draws the limits and the kernels below them. `points` has every kernel once for each number of threads.
pub(crate) fn draw(path: &Path, limits: &Limits, points: &[Point], thread_counts: &[usize]) -> Drawn {
    let intensities = points.iter().map(|point| point.work.flops / point.work.bytes);
    let x = Axis::around(intensities, 2.0, PLOT.0);
    let rates = points.iter().map(Point::gflops).chain(limits.fma.iter().map(|rate| rate.per_second / 1e9));
    let y = Axis::around(rates.clone(), 2.0, PLOT.1);

    let panels = thread_counts.len() as i32;
    let width = panels * (LEFT + PLOT.0) + 24 + LEGEND - FIGURES + panels * FIGURES;
    let area = SVGBackend::new(path, (width as u32, (TOP + PLOT.1 + BOTTOM) as u32)).into_drawing_area();
    area.fill(&WHITE)?;
    let title = format!("Roofline of this machine, and the kernels of polyhead on {}", limits.level.name());
    label(&area, (LEFT, 24), &title, 18, INK, (HPos::Left, VPos::Center))?;
    for (i, &threads) in (0..).zip(thread_counts) {
        let corner = (LEFT + i * (LEFT + PLOT.0), TOP);
        let mut panel = Panel { area: &area, corner, x, y, taken: Vec::new() };
        panel.axes(threads)?;
        let points: Vec<&Point> = points.iter().filter(|point| point.threads == threads).collect();
        panel.mark(&points);
        panel.roofs(limits, threads)?;
        panel.points(&points)?;
    }
    legend(&area, panels * (LEFT + PLOT.0) + 24, points, thread_counts)?;
    area.present()?;
    Ok(())
}

impl Panel<'_, '_> {
    fn at(&self, (intensity, gflops): (f64, f64)) -> (i32, i32) {
        (self.corner.0 + self.x.at(intensity), self.corner.1 + self.y.pixels - self.y.at(gflops))
    }

    fn place(&self, point: &Point) -> (i32, i32) {
        self.at((point.work.flops / point.work.bytes, point.gflops()))
    }

    fn line(&self, from: (f64, f64), to: (f64, f64), color: RGBColor, width: u32) -> Drawn {
        let path = vec![self.at(from), self.at(to)];
        Ok(self.area.draw(&PathElement::new(path, color.stroke_width(width)))?)
    }

    fn axes(&self, threads: usize) -> Drawn {
        let (x, y) = (self.x, self.y);
        let (left, bottom) = (self.corner.0, self.corner.1 + y.pixels);
        for tick in x.ticks(2.0) {
            self.line((tick, y.low), (tick, y.high), GRID, 1)?;
            let at = (self.at((tick, y.low)).0, bottom + 12);
            label(self.area, at, &number(tick), TEXT, INK, (HPos::Center, VPos::Center))?;
        }
        for tick in y.ticks(2.0) {
            self.line((x.low, tick), (x.high, tick), GRID, 1)?;
            let at = (left - 8, self.at((x.low, tick)).1);
            label(self.area, at, &number(tick), TEXT, INK, (HPos::Right, VPos::Center))?;
        }
        let middle = (left + x.pixels / 2, bottom + 36);
        let what = "FLOP / byte of compulsory traffic (slanted: read bandwidth at a working set)";
        label(self.area, middle, what, TEXT, INK, (HPos::Center, VPos::Center))?;
        let threads = if threads == 1 { "one thread".to_owned() } else { format!("{threads} threads") };
        let what = format!("GFLOP/s, {threads}");
        label(self.area, (left, self.corner.1 - 14), &what, TEXT + 2, INK, (HPos::Left, VPos::Center))
    }

    /// Keeps labels off the points.
    fn mark(&mut self, points: &[&Point]) {
        for point in points {
            let (x, y) = self.place(point);
            self.taken.push([x - RADIUS - 1, y - RADIUS - 1, x + RADIUS + 1, y + RADIUS + 1]);
        }
    }

    /// Whether a label may stand there; it then does.
    fn claim(&mut self, rect: Rect) -> bool {
        let (left, top) = self.corner;
        let inside = rect[0] > left && rect[1] > top && rect[2] < left + self.x.pixels && rect[3] < top + self.y.pixels;
        let free = inside && !self.taken.iter().any(|taken| overlap(taken, &rect));
        if free {
            self.taken.push(rect);
        }
        free
    }

    fn roofs(&mut self, limits: &Limits, threads: usize) -> Drawn {
        let (x, y) = (self.x, self.y);
        let peak = limits.fma_peak(threads) / 1e9;
        let slopes = [L2_BYTES, DRAM_BYTES].map(|bytes| (bytes, limits.read_bandwidth(threads, bytes as f64) / 1e9));
        let steepest = slopes.iter().map(|slope| slope.1).fold(0.0, f64::max);
        let mut slanted = Vec::new();
        for (bytes, slope) in slopes {
            let start = if slope * x.low >= y.low { x.low } else { y.low / slope };
            let end = (peak / slope).min(x.high);
            self.line((start, slope * start), (end, slope * end), ROOF, 2)?;
            let steps = (0..=200).map(|step| start * (end / start).powf(f64::from(step) / 200.0));
            let along: Vec<_> = steps.map(|x| self.at((x, slope * x))).collect();
            self.taken.extend(along.iter().map(|&(x, y)| [x - 2, y - 2, x + 2, y + 2]));
            slanted.push((format!("{}: {slope:.0} GB/s", size(bytes)), along));
        }
        let peaks: Vec<&Rate> = limits.fma.iter().filter(|rate| rate.threads == threads).collect();
        for rate in &peaks {
            let gflops = rate.per_second / 1e9;
            self.line((gflops / steepest, gflops), (x.high, gflops), ROOF, 2)?;
            let ((left, y), (right, _)) = (self.at((gflops / steepest, gflops)), self.at((x.high, gflops)));
            self.taken.push([left, y - 2, right, y + 2]);
        }
        for (text, along) in slanted {
            // Beside the line where there is room, from its foot upwards; else above its end.
            let beside = along.iter().flat_map(|&(x, y)| [(x + 12, y + 8), (x - 12 - extent(&text), y - 8)]);
            let above = along.last().into_iter().flat_map(|&(x, y)| (1..9).map(move |i| (x, y - 10 * i)));
            self.write(&text, beside.chain(above).collect())?;
        }
        for rate in peaks {
            let gflops = rate.per_second / 1e9;
            let text = format!("FMA {} {gflops:.0} GFLOP/s", rate.level.name());
            let (right, y) = self.at((x.high, gflops));
            // Above the line, or below it, as far to the right as there is room.
            let spots = (0..40).flat_map(|step| {
                let x = right - 6 - extent(&text) - 8 * step;
                [(x, y - 10), (x, y + 10)]
            });
            self.write(&text, spots.collect())?;
        }
        Ok(())
    }

    /// Writes a text at the first spot (left end, middle of its height) that is free.
    fn write(&mut self, text: &str, spots: Vec<(i32, i32)>) -> Drawn {
        let spot = spots.into_iter().find(|&(x, y)| self.claim([x, y - TEXT / 2, x + extent(text), y + TEXT / 2]));
        match spot {
            Some(at) => label(self.area, at, text, TEXT, ROOF, (HPos::Left, VPos::Center)),
            None => Ok(()),
        }
    }

    /// Points with their numbers, each as near as there is room.
    fn points(&mut self, points: &[&Point]) -> Drawn {
        for (number, point) in (1..).zip(points) {
            let (at, color) = (self.place(point), color_of(&point.name));
            let text = number.to_string();
            let (half_width, half_height) = (extent(&text) / 2 + 1, TEXT / 2);
            let around = (12..120).step_by(6).flat_map(|distance| (0..16).map(move |turn| (f64::from(distance), turn)));
            let spots = around.map(|(distance, turn)| {
                let angle = std::f64::consts::TAU * f64::from(turn) / 16.0;
                (at.0 + (distance * angle.sin()) as i32, at.1 - (distance * angle.cos()) as i32)
            });
            let rect = |(x, y): (i32, i32)| [x - half_width, y - half_height, x + half_width, y + half_height];
            for spot in spots.collect::<Vec<_>>() {
                if self.claim(rect(spot)) {
                    self.area.draw(&PathElement::new(vec![at, spot], color.mix(0.35).stroke_width(1)))?;
                    self.area.draw(&Rectangle::new(
                        [(spot.0 - half_width, spot.1 - half_height), (spot.0 + half_width, spot.1 + half_height)],
                        WHITE.filled(),
                    ))?;
                    label(self.area, spot, &text, TEXT, color, (HPos::Center, VPos::Center))?;
                    break;
                }
            }
            self.area.draw(&Circle::new(at, RADIUS, color.filled()))?;
        }
        Ok(())
    }
}

/// The kernels by number, with GFLOP/s and the share of the limit for each number of threads.
fn legend(area: &Area<'_>, left: i32, points: &[Point], thread_counts: &[usize]) -> Drawn {
    let names: Vec<&Point> = points.iter().filter(|point| point.threads == thread_counts[0]).collect();
    let column = |i: usize| left + LEGEND - FIGURES + FIGURES * i as i32 + FIGURES - 14;
    for (i, threads) in thread_counts.iter().enumerate() {
        let plural = if *threads == 1 { "" } else { "s" };
        let at = (column(i), TOP - 14);
        label(area, at, &format!("{threads} thread{plural}"), TEXT, INK, (HPos::Right, VPos::Center))?;
        for (text, right) in [("GFLOP/s", PERCENT), ("of limit", 0)] {
            label(area, (column(i) - right, TOP + 6), text, TEXT - 2, ROOF, (HPos::Right, VPos::Center))?;
        }
    }
    for (row, point) in names.iter().enumerate() {
        let (y, color) = (TOP + LINE * (row as i32 + 1) + 6, color_of(&point.name));
        label(area, (left + 18, y), &(row + 1).to_string(), TEXT, color, (HPos::Right, VPos::Center))?;
        label(area, (left + 28, y), &point.name, TEXT, color, (HPos::Left, VPos::Center))?;
        for (i, &threads) in thread_counts.iter().enumerate() {
            let same = points.iter().find(|other| other.threads == threads && other.name == point.name);
            if let Some(point) = same {
                let figures = [(format!("{:.1}", point.gflops()), PERCENT), (format!("{:.0} %", point.percent()), 0)];
                for (text, right) in figures {
                    label(area, (column(i) - right, y), &text, TEXT, INK, (HPos::Right, VPos::Center))?;
                }
            }
        }
    }
    Ok(())
}

/// A color for each family of kernels, by the first word of the name.
fn color_of(name: &str) -> RGBColor {
    match name.split(' ').next() {
        Some("prefill") => RGBColor(20, 90, 170),
        Some("decode") => RGBColor(190, 70, 10),
        Some("softmax") => RGBColor(20, 120, 60),
        Some("GEMM") => RGBColor(120, 40, 140),
        _ => RGBColor(0, 120, 140),
    }
}

/// A power of two in as few characters as it takes.
fn number(x: f64) -> String {
    if x < 1.0 { format!("1/{:.0}", 1.0 / x) } else { format!("{x:.0}") }
}

fn extent(text: &str) -> i32 {
    (text.chars().count() as f64 * CHARACTER).ceil() as i32
}

/// A text style of so many pixels. plotters takes the height of a line, which it holds to be 1.24 of the font's size.
fn style(size: i32, color: RGBColor, (h, v): (HPos, VPos)) -> TextStyle<'static> {
    (FontFamily::SansSerif, f64::from(size) * 1.24).into_font().color(&color).pos(Pos::new(h, v))
}

fn label(area: &Area<'_>, at: (i32, i32), text: &str, size: i32, color: RGBColor, anchor: (HPos, VPos)) -> Drawn {
    area.draw(&Text::new(text, at, style(size, color, anchor)))?;
    Ok(())
}
