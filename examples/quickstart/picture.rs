//! Heat maps of attention weights as an SVG file.

use std::error::Error;
use std::path::Path;

use plotters::coord::Shift;
use plotters::prelude::*;
use plotters::style::text_anchor::{HPos, Pos, VPos};

use crate::heads::HeadMaps;
use crate::minilm::MiniLm;

type Area<'a> = DrawingArea<SVGBackend<'a>, Shift>;
type Drawn = Result<(), Box<dyn Error>>;

/// Everything in pixels, whole ones, so that no seam shows between cells.
const CELL: i32 = 16;
const LABEL_SIZE: i32 = 12;
const TITLE_SIZE: i32 = 14;
/// Room for a label: the width of a character of a sans-serif font is at most 0.62 of its size, on average over a word.
const CHARACTER: f64 = 0.62 * LABEL_SIZE as f64;
const GAP: i32 = 18;
const HEADER: i32 = 66;
/// Heads in a row; the column after them has the single head and the scale.
const COLUMNS: i32 = 4;
const INK: RGBColor = RGBColor(34, 34, 34);
const MARK: RGBColor = RGBColor(200, 30, 30);

/// Where the parts of a heat map are.
#[derive(Clone, Copy)]
struct Panel {
    /// Room for the labels at the left and at the top.
    labels: i32,
    /// Side of the map.
    side: i32,
}

impl Panel {
    fn new(tokens: &[String]) -> Self {
        let longest = tokens.iter().map(|token| token.chars().count()).max().unwrap_or(0);
        Self { labels: (longest as f64 * CHARACTER).ceil() as i32 + 6, side: CELL * tokens.len() as i32 }
    }

    fn width(self) -> i32 {
        self.labels + self.side + GAP
    }

    fn height(self) -> i32 {
        TITLE_SIZE + 6 + self.labels + self.side + GAP
    }

    /// Corner of the panel in this column and row of the picture.
    fn corner(self, column: i32, row: i32) -> (i32, i32) {
        (GAP + column * self.width(), HEADER + row * self.height())
    }

    /// Corner of the map in a panel.
    fn map(self, (x, y): (i32, i32)) -> (i32, i32) {
        (x + self.labels, y + TITLE_SIZE + 6 + self.labels)
    }
}

/// Draws one sentence: a map for each head, and beside them that of the single head.
pub(crate) fn draw(
    path: &Path,
    many: &HeadMaps,
    one: &HeadMaps,
    model: &MiniLm,
    sentence: usize,
    word: &str,
) -> Result<(), Box<dyn Error>> {
    let tokens = &model.tokens[sentence];
    let panel = Panel::new(tokens);
    let rows = (many.num_heads() as i32 + COLUMNS - 1) / COLUMNS;
    let size = (2 * GAP + (COLUMNS + 1) * panel.width(), HEADER + rows * panel.height() + GAP);
    let area = SVGBackend::new(path, (size.0 as u32, size.1 as u32)).into_drawing_area();
    area.fill(&WHITE)?;
    header(&area, model, sentence, word)?;

    let marked = tokens.iter().position(|token| token == word);
    let map = |corner, title: &str, maps: &HeadMaps, head: usize| {
        heat_map(&area, panel, corner, title, tokens, marked, |query| maps.row(sentence, head, query))
    };
    for head in 0..many.num_heads() {
        let at = head as i32;
        map(panel.corner(at % COLUMNS, at / COLUMNS), &format!("head {head}"), many, head)?;
    }
    map(panel.corner(COLUMNS, 0), &format!("one head of {}", model.width), one, 0)?;
    scale(&area, panel, panel.corner(COLUMNS, 1))?;
    let (x, y) = panel.map(panel.corner(COLUMNS, 2));
    let comparison = [
        "One head: the same queries,",
        "keys and values, with each",
        "token's heads taken as one",
        "vector under one softmax.",
    ];
    for (line, text) in comparison.into_iter().enumerate() {
        label(&area, (x, y + 20 * line as i32), text, TITLE_SIZE, INK, (HPos::Left, VPos::Center))?;
    }
    area.present()?;
    Ok(())
}

fn header(area: &Area<'_>, model: &MiniLm, sentence: usize, word: &str) -> Drawn {
    let MiniLm { layer, num_heads, sentences, .. } = model;
    let title = format!("Attention of {num_heads} heads: layer {layer} of all-MiniLM-L6-v2, computed by polyhead");
    let text = format!("\u{201c}{}\u{201d}", sentences[sentence]);
    let how = format!("Rows attend to columns; the row of \u{201c}{word}\u{201d} is framed.");
    label(area, (GAP, 20), &title, 18, INK, (HPos::Left, VPos::Center))?;
    label(area, (GAP, 44), &format!("{text}  {how}"), TITLE_SIZE, INK, (HPos::Left, VPos::Center))
}

fn heat_map<'a>(
    area: &Area<'_>,
    panel: Panel,
    corner: (i32, i32),
    title: &str,
    tokens: &[String],
    marked: Option<usize>,
    row: impl Fn(usize) -> &'a [f32],
) -> Drawn {
    let (left, top) = panel.map(corner);
    let middle = left + panel.side / 2;
    label(area, (middle, corner.1 + TITLE_SIZE / 2), title, TITLE_SIZE, INK, (HPos::Center, VPos::Center))?;
    for (i, token) in tokens.iter().enumerate() {
        let along = CELL * i as i32 + CELL / 2;
        let color = if marked == Some(i) { MARK } else { INK };
        label(area, (left - 4, top + along), token, LABEL_SIZE, color, (HPos::Right, VPos::Center))?;
        label_upward(area, (left + along, top - 4), token, color)?;
    }
    for query in 0..tokens.len() {
        for (key, &weight) in row(query).iter().enumerate() {
            let (x, y) = (left + CELL * key as i32, top + CELL * query as i32);
            area.draw(&Rectangle::new([(x, y), (x + CELL, y + CELL)], color_of(weight).filled()))?;
        }
    }
    frame(area, (left, top), (panel.side, panel.side), INK)?;
    if let Some(query) = marked {
        frame(area, (left, top + CELL * query as i32), (panel.side, CELL), MARK)?;
    }
    Ok(())
}

/// What the colors mean.
fn scale(area: &Area<'_>, panel: Panel, corner: (i32, i32)) -> Drawn {
    const STEPS: i32 = 100;
    const WIDTH: i32 = 20;
    let (left, top) = panel.map(corner);
    let height = panel.side;
    label(area, (left, top - 18), "attention weight", TITLE_SIZE, INK, (HPos::Left, VPos::Center))?;
    let y_of = |share: f64| top + height - (share * f64::from(height)).round() as i32;
    for step in 0..STEPS {
        let [low, high] = [step, step + 1].map(|step| f64::from(step) / f64::from(STEPS));
        let color = color_of(weight_at((low + high) / 2.0));
        area.draw(&Rectangle::new([(left, y_of(high)), (left + WIDTH, y_of(low))], color.filled()))?;
    }
    frame(area, (left, top), (WIDTH, height), INK)?;
    for weight in [0.0f32, 0.01, 0.05, 0.1, 0.2, 0.3, 0.5, 0.7, 1.0] {
        let y = y_of(share_of(weight));
        area.draw(&PathElement::new([(left + WIDTH, y), (left + WIDTH + 5, y)], INK))?;
        label(area, (left + WIDTH + 9, y), &weight.to_string(), LABEL_SIZE, INK, (HPos::Left, VPos::Center))?;
    }
    Ok(())
}

/// Place of a weight on the scale from 0 to 1. The square root, since most weights are small.
fn share_of(weight: f32) -> f64 {
    f64::from(weight).clamp(0.0, 1.0).sqrt()
}

fn weight_at(share: f64) -> f32 {
    (share * share) as f32
}

/// From white over blue to almost black.
fn color_of(weight: f32) -> RGBColor {
    const STOPS: [(u8, u8, u8); 6] =
        [(255, 255, 255), (207, 225, 242), (127, 184, 218), (53, 126, 185), (10, 74, 144), (6, 24, 58)];
    let at = share_of(weight) * (STOPS.len() - 1) as f64;
    let first = (at as usize).min(STOPS.len() - 2);
    let (a, b) = (STOPS[first], STOPS[first + 1]);
    let mix = |a: u8, b: u8| (f64::from(a) + (f64::from(b) - f64::from(a)) * (at - first as f64)).round() as u8;
    RGBColor(mix(a.0, b.0), mix(a.1, b.1), mix(a.2, b.2))
}

fn frame(area: &Area<'_>, (x, y): (i32, i32), (width, height): (i32, i32), color: RGBColor) -> Drawn {
    area.draw(&Rectangle::new([(x, y), (x + width, y + height)], color.stroke_width(1)))?;
    Ok(())
}

/// A text style of so many pixels. plotters takes the height of a line, which it holds to be 1.24 of the font's size.
fn style(size: i32, color: RGBColor, (h, v): (HPos, VPos)) -> TextStyle<'static> {
    (FontFamily::SansSerif, f64::from(size) * 1.24).into_font().color(&color).pos(Pos::new(h, v))
}

fn label(area: &Area<'_>, at: (i32, i32), text: &str, size: i32, color: RGBColor, anchor: (HPos, VPos)) -> Drawn {
    area.draw(&Text::new(text, at, style(size, color, anchor)))?;
    Ok(())
}

/// A label that reads from the bottom to the top.
fn label_upward(area: &Area<'_>, at: (i32, i32), text: &str, color: RGBColor) -> Drawn {
    let style = style(LABEL_SIZE, color, (HPos::Left, VPos::Center)).transform(FontTransform::Rotate270);
    area.draw(&Text::new(text, at, style))?;
    Ok(())
}
